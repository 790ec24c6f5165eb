// Host entry points: each sequence is one piece of work for the next free thread.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "best_path_cpu.h"
#include "gradient_cpu.h"
#include "sequence_cpu.h"
#include "status.h"
#include "sweep_cpu.h"

namespace states_alignment {
namespace {

// Columns times slots that are worth a thread: starting one takes about 20 us.
constexpr int64_t kElementsPerThread = 1 << 15;

Shape shape_of(const states_alignment_batch& batch, int64_t b) {
  return {std::clamp<int64_t>(batch.target_lengths[b], 0, batch.max_targets),
          std::clamp<int64_t>(batch.state_lengths[b], 0, batch.max_states)};
}

template <class Real>
Sequence<Real> sequence_of(const states_alignment_batch& batch, int64_t b) {
  return {static_cast<const Real*>(batch.log_emit) + b * batch.emit_batch_stride,
          static_cast<const Real*>(batch.log_trans) + b * batch.trans_batch_stride, batch.emit_row_stride,
          batch.trans_row_stride, shape_of(batch, b)};
}

int64_t max_rows(const states_alignment_batch& batch) { return Shape{batch.max_targets, 0}.rows(kRowPad); }

// Numbers in the columns of any sequence of a batch: no BandLayout of its shapes has more. With T targets and S states
// a layout has at most round_up(T + 1, kRowPad) rows, and at most the smaller of S - T + 30 and round_up(S, kBlock) + 1
// columns. Of all T with the same number of rows, T = rows - kRowPad has the most columns.
int64_t saved_numbers(int64_t max_targets, int64_t max_states) {
  static_assert(kRowPad == 16 && kBlock == 8);
  const int64_t rows = Shape{max_targets, 0}.rows(kRowPad);
  // rows * (S - rows + 46) is largest at rows = (S + 46) / 2
  const bool is_short = 2 * rows <= max_states + 46;
  const int64_t most = is_short ? rows * (max_states - rows + 46) : (max_states + 46) * (max_states + 46) / 4;
  return std::min(rows * (round_up(max_states, kBlock) + 1), most);
}

template <class Real>
int64_t saved_bytes(const states_alignment_batch& batch) {
  return saved_numbers(batch.max_targets, batch.max_states) *
         static_cast<int64_t>(sizeof(Real) + sizeof(typename Format<Real>::Int));
}

// Columns of a sequence in a saved block: all mantissas, then all exponents.
template <class Real>
Columns<Real> columns_in(void* memory, const states_alignment_batch& batch, const Shape& shape) {
  using Int = typename Format<Real>::Int;
  Real* mantissas = static_cast<Real*>(memory);
  void* exponents = mantissas + saved_numbers(batch.max_targets, batch.max_states);
  return Columns<Real>::in(mantissas, static_cast<Int*>(exponents), shape);
}

// Number of elements that hold the layout of any sequence of a batch.
template <class LayoutOf>
int64_t largest_size(const states_alignment_batch& batch, LayoutOf&& layout_of) {
  int64_t size = 0;
  for (int64_t b = 0; b < batch.batch; ++b) {
    const Shape shape = shape_of(batch, b);
    if (shape.has_path()) size = std::max(size, layout_of(shape).size);
  }
  return size;
}

// Memory for the columns of one sequence at a time.
template <class Real>
class OwnColumns {
 public:
  explicit OwnColumns(const states_alignment_batch& batch)
      : size_(largest_size(batch, Columns<Real>::layout_of)), mantissas_(size_), exponents_(size_) {}
  Columns<Real> of(const Shape& shape) const { return Columns<Real>::in(mantissas_.get(), exponents_.get(), shape); }

 private:
  const int64_t size_;
  Buffer<Real> mantissas_;
  Buffer<typename Format<Real>::Int> exponents_;
};

template <class Real>
SweepScratch<Real> sweep_scratch(const states_alignment_batch& batch) {
  return SweepScratch<Real>(max_rows(batch), batch.max_states,
                            largest_size(batch, SweepScratch<Real>::relative_layout));
}

template <class Real>
class Forward {
 public:
  Forward(const states_alignment_batch& batch, Real* nll, void* saved)
      : batch_(batch), nll_(nll), saved_(static_cast<char*>(saved)), scratch_(sweep_scratch<Real>(batch)) {
    if (!saved) own_columns_.emplace(batch);
  }

  void operator()(int64_t b) {
    const Sequence<Real> sequence = sequence_of<Real>(batch_, b);
    const Shape shape = sequence.shape;
    char* memory = saved_ ? saved_ + b * saved_bytes<Real>(batch_) : nullptr;
    // so that memory which the sweep does not write is the same in every run
    if (memory) std::memset(memory, 0, static_cast<size_t>(saved_bytes<Real>(batch_)));
    if (!shape.has_path()) {
      nll_[b] = std::numeric_limits<Real>::infinity();
      return;
    }
    const Columns<Real> alpha = memory ? columns_in<Real>(memory, batch_, shape) : own_columns_->of(shape);
    const NoObserver observer;
    Sweep<Real, Direction::kForward, const NoObserver> sweep(sequence, alpha, scratch_, observer);
    sweep.run();
    Real& likelihood = alpha.mantissas(shape.states - 1, shape.targets)[shape.targets % Columns<Real>::kWidth];
    if (sweep.is_invalid()) likelihood = std::numeric_limits<Real>::quiet_NaN();
    const int64_t exponent = alpha.at(shape.states - 1, shape.targets).exponent;
    nll_[b] = static_cast<Real>(
        -(std::log(static_cast<double>(likelihood)) + static_cast<double>(exponent) * 0.6931471805599453));
    if (likelihood == 0) nll_[b] = std::numeric_limits<Real>::infinity();
  }

 private:
  const states_alignment_batch& batch_;
  Real* nll_;
  char* saved_;
  SweepScratch<Real> scratch_;
  std::optional<OwnColumns<Real>> own_columns_;
};

template <class Real>
class Backward {
 public:
  using Exact = ScalarLane<Real>;

  Backward(const states_alignment_batch& batch, const void* saved, const Real* grad_nll, Real* grad_emit,
           Real* grad_trans)
      : batch_(batch), saved_(static_cast<const char*>(saved)), grad_nll_(grad_nll), grad_emit_(grad_emit),
        grad_trans_(grad_trans), sweep_scratch_(sweep_scratch<Real>(batch)),
        gradient_scratch_(max_rows(batch), batch.max_states), own_columns_(batch) {}

  void operator()(int64_t index) {
    // from the last to the first: the cache still holds what the forward sweep read and wrote last
    const int64_t b = batch_.batch - 1 - index;
    const Sequence<Real> sequence = sequence_of<Real>(batch_, b);
    const Shape shape = sequence.shape;
    const int64_t stride = batch_.max_states;
    Real* grad_emit = grad_emit_ ? grad_emit_ + b * batch_.max_targets * stride : nullptr;
    Real* grad_trans = grad_trans_ ? grad_trans_ + b * stride * stride : nullptr;
    // the sweep never writes to alpha; Columns has no const version
    char* saved = const_cast<char*>(saved_) + b * saved_bytes<Real>(batch_);
    const Columns<Real> alpha = columns_in<Real>(saved, batch_, shape);
    const Scaled<Exact> likelihood =
        shape.has_path() ? alpha.at(shape.states - 1, shape.targets) : Scaled<Exact>{Real{0}, kDead};
    if (grad_emit) std::fill_n(grad_emit, batch_.max_targets * stride, Real{0});
    if (likelihood.mantissa == 0) {
      if (grad_trans) std::fill_n(grad_trans, stride * stride, Real{0});
      return;
    }
    if (std::isnan(likelihood.mantissa)) {
      poison(shape, grad_emit, grad_trans);
      return;
    }
    if (grad_trans) std::fill_n(grad_trans + shape.states * stride, (stride - shape.states) * stride, Real{0});
    const Columns<Real> beta = own_columns_.of(shape);
    Gradients<Real> gradients(sequence, alpha, beta, grad_nll_[b], grad_emit, grad_trans, stride, gradient_scratch_);
    Sweep<Real, Direction::kBackward, Gradients<Real>>(sequence, beta, sweep_scratch_, gradients).run();
  }

 private:
  // Zeros wherever there is no edge.
  void clear_outside(const Shape& shape, Real* grad_trans) const {
    const int64_t stride = batch_.max_states;
    for (int64_t v = 0; v < stride; ++v) {
      Real* row = grad_trans + v * stride;
      const int64_t first = std::min(v + 1, shape.states);
      std::fill(row, row + first, Real{0});
      std::fill(row + (v < shape.states - 1 ? shape.states : first), row + stride, Real{0});
    }
  }

  // The loss is NaN, and so is its gradient at all entries that are read.
  void poison(const Shape& shape, Real* grad_emit, Real* grad_trans) const {
    const int64_t stride = batch_.max_states;
    const Real nan = std::numeric_limits<Real>::quiet_NaN();
    for (int64_t t = 0; grad_emit && t < shape.targets; ++t) {
      std::fill_n(grad_emit + t * stride + 1, shape.states - 2, nan);
    }
    if (!grad_trans) return;
    for (int64_t v = 0; v < shape.states; ++v) std::fill_n(grad_trans + v * stride, shape.states, nan);
    clear_outside(shape, grad_trans);
  }

  const states_alignment_batch& batch_;
  const char* saved_;
  const Real* grad_nll_;
  Real* grad_emit_;
  Real* grad_trans_;
  SweepScratch<Real> sweep_scratch_;
  GradientScratch<Real> gradient_scratch_;
  OwnColumns<Real> own_columns_;
};

template <class Real>
class BestPath {
 public:
  BestPath(const states_alignment_batch& batch, int64_t* nodes)
      : batch_(batch), nodes_(nodes), scratch_(batch.max_states, max_rows(batch)) {}

  void operator()(int64_t b) {
    int64_t* nodes = nodes_ + b * batch_.max_targets;
    std::fill_n(nodes, batch_.max_targets, int64_t{-1});
    const Sequence<Real> sequence = sequence_of<Real>(batch_, b);
    if (sequence.shape.has_path()) find_best_path(sequence, scratch_, nodes);
  }

 private:
  const states_alignment_batch& batch_;
  int64_t* nodes_;
  BestPathScratch scratch_;
};

// Runs make_worker()(b) for every sequence b. Each thread makes its own worker and keeps its scratch memory.
template <class MakeWorker>
int32_t for_each_sequence(const states_alignment_batch& batch, int32_t num_threads, MakeWorker&& make_worker) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  const auto work = [&] {
    try {
      const FlushSubnormals flush;
      auto worker = make_worker();
      for (int64_t b = next++; b < batch.batch; b = next++) (*worker)(b);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  };
  const int64_t elements = batch.batch * batch.max_states * max_rows(batch);
  const int64_t wanted = std::min<int64_t>({num_threads, batch.batch, 1 + elements / kElementsPerThread});
  std::vector<std::thread> threads;
  try {
    for (int64_t i = 1; i < wanted; ++i) threads.emplace_back(work);
  } catch (const std::bad_alloc&) {
    // fewer threads do the same work
  } catch (const std::system_error&) {
  }
  work();
  for (std::thread& thread : threads) thread.join();
  // a thread without scratch memory leaves its share to the others
  return out_of_memory && next < batch.batch ? STATES_ALIGNMENT_OUT_OF_MEMORY : STATES_ALIGNMENT_OK;
}

int32_t check(const states_alignment_batch& batch) {
  if (batch.dtype != STATES_ALIGNMENT_FLOAT32 && batch.dtype != STATES_ALIGNMENT_FLOAT64) {
    return STATES_ALIGNMENT_BAD_DTYPE;
  }
  return has_negative_size(batch) ? STATES_ALIGNMENT_BAD_SIZE : STATES_ALIGNMENT_OK;
}

template <class Worker, class... Arguments>
int32_t run(const states_alignment_batch& batch, int32_t num_threads, const Arguments&... arguments) {
  return for_each_sequence(batch, num_threads, [&] { return std::make_unique<Worker>(batch, arguments...); });
}

}  // namespace
}  // namespace states_alignment

using namespace states_alignment;

int32_t states_alignment_abi(void) { return STATES_ALIGNMENT_ABI; }

const char* states_alignment_message(int32_t status) { return message_of(status); }

int64_t states_alignment_saved_words_cpu(int64_t max_targets, int64_t max_states) {
  return 2 * saved_numbers(max_targets, max_states);
}

int32_t states_alignment_forward_cpu(const states_alignment_batch* batch, void* nll, void* saved,
                                     int32_t num_threads) {
  const int32_t status = check(*batch);
  if (status != STATES_ALIGNMENT_OK) return status;
  return batch->dtype == STATES_ALIGNMENT_FLOAT32
             ? run<Forward<float>>(*batch, num_threads, static_cast<float*>(nll), saved)
             : run<Forward<double>>(*batch, num_threads, static_cast<double*>(nll), saved);
}

int32_t states_alignment_backward_cpu(const states_alignment_batch* batch, const void* saved, const void* grad_nll,
                                      void* grad_emit, void* grad_trans, int32_t num_threads) {
  const int32_t status = check(*batch);
  if (status != STATES_ALIGNMENT_OK) return status;
  return batch->dtype == STATES_ALIGNMENT_FLOAT32
             ? run<Backward<float>>(*batch, num_threads, saved, static_cast<const float*>(grad_nll),
                                    static_cast<float*>(grad_emit), static_cast<float*>(grad_trans))
             : run<Backward<double>>(*batch, num_threads, saved, static_cast<const double*>(grad_nll),
                                     static_cast<double*>(grad_emit), static_cast<double*>(grad_trans));
}

int32_t states_alignment_best_cpu(const states_alignment_batch* batch, int64_t* nodes, int32_t num_threads) {
  const int32_t status = check(*batch);
  if (status != STATES_ALIGNMENT_OK) return status;
  return batch->dtype == STATES_ALIGNMENT_FLOAT32 ? run<BestPath<float>>(*batch, num_threads, nodes)
                                                  : run<BestPath<double>>(*batch, num_threads, nodes);
}
