// Both sweeps of every sequence on the device: one block of threads each, all in one launch.
//
// Columns are taken in panels of kPanel. For a panel, the block
//   1. sums over all columns before it: a lane owns kRowsPerLane slots, a warp every kWarps-th chunk of sources, so
//      that an edge is exponentiated once for all slots of the block and a slot is read once for kPanel edges;
//   2. completes its columns one after the other, a thread owning one slot; slot t + 1 passes to its neighbour.
// So a sequence costs S dependent steps of one barrier each, not T steps that each read all of its edges again.
#ifndef STATES_ALIGNMENT_SWEEP_CUDA_CUH_
#define STATES_ALIGNMENT_SWEEP_CUDA_CUH_

#include "device.cuh"

namespace states_alignment {

constexpr int kPanel = 16;
constexpr int kQuads = kPanel / 4;
constexpr int kBatch = 4;  // sources whose slots are loaded together
constexpr int kPanelStride = kPanel + 4;  // rows of whole quads whose starts spread over the banks

template <int kRowsPerLane>
struct alignas(16) SweepShared {
  static constexpr int kRows = kWarp * kRowsPerLane;
  float sums[kWarps][kPanel][kRows];
  float edges[kWarps][kPanel][kPanelStride];
  float panel_edges[kPanel][kPanelStride];
  // Slot t + 1 of a column, written by the thread of slot t; [0] comes from the slots before these. Indexed by the
  // parity of the column, so that one barrier separates writing from reading.
  Number passed[2][kRows + 1];
  Number last_passed[2][kPanel];  // of the last slot, for the slots after these; by parity of the group of slots
  int32_t is_faint_row[kRows];
  int32_t has_faint_edge;
  int32_t has_steep_edge;
  int32_t is_invalid;
};

// Cases that block products cannot handle: edges that underflow beside a small alpha, and edges that are too large;
// their columns are summed exactly. Also values that are not log probabilities.
struct EdgeFlags {
  bool has_faint = false;
  bool has_steep = false;
  bool has_invalid = false;

  template <class Shared>
  SA_DEVICE void publish(Shared& shared) const {
    if (has_faint) shared.has_faint_edge = 1;
    if (has_steep) shared.has_steep_edge = 1;
    if (has_invalid) shared.is_invalid = 1;
  }
};

// exp of an edge for block products.
SA_DEVICE float linear_edge(float log_edge, EdgeFlags& flags) {
  const Number edge = exp_of(log_edge);
  const bool is_steep = edge.exponent > Format<float>::kSteep;
  flags.has_faint |= edge.exponent > kDead && edge.exponent < -Format<float>::kWide;
  flags.has_steep |= is_steep;
  flags.has_invalid |= is_invalid(log_edge);
  return is_steep ? 0.0f : edge.mantissa * pow2(edge.exponent);
}

// Whether 2^exponent is alive and below 2^-kWide, in one comparison; dead exponents lie below -kMaxExponent.
SA_DEVICE bool is_faint_exponent(int32_t exponent) {
  return static_cast<uint32_t>(exponent + kMaxExponent) < static_cast<uint32_t>(kMaxExponent - Format<float>::kWide);
}

// Sum at `step` over all columns before `column`, at any magnitude; slow, for sums that products cannot handle.
template <class Element>
SA_DEVICE_NOINLINE Number exact_sum(const View<Element>& view, const DeviceColumns& columns, int64_t column,
                                    int64_t step) {
  // columns whose slot `step` can be alive: a column holds no more targets than its number
  const int64_t last = at_most(column, view.shape.states - 1 - view.shape.targets + step);
  int32_t peak = kDead;
  for (int64_t v = step; v < last; ++v) {
    peak = larger<ScalarLane<float>>(
        peak, columns.exponent[v * columns.rows + step] + exp_of(to_float(*view.edge(v, column))).exponent);
  }
  float sum = 0.0f;
  for (int64_t v = step; v < last; ++v) {
    const Number source = columns.at(v, step), edge = exp_of(to_float(*view.edge(v, column)));
    sum += source.mantissa * edge.mantissa * pow2(source.exponent + edge.exponent - peak);
  }
  return normal(sum, peak);
}

// Step 1 for the slots [first_row, first_row + kRows): each warp writes its share of the sums to shared memory.
template <class Element, int kRowsPerLane>
SA_DEVICE void add_products(const View<Element>& view, const DeviceColumns& columns, const int32_t* peaks,
                            int64_t panel, int64_t width, int64_t first_row, SweepShared<kRowsPerLane>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  float sum[kRowsPerLane][kPanel];
  int32_t peak[kRowsPerLane];
  bool is_faint[kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int64_t row = first_row + i * kWarp + lane;
    peak[i] = row < columns.rows ? peaks[row] : kMaxExponent;  // larger than any number beyond the last slot
    is_faint[i] = false;
#pragma unroll
    for (int column = 0; column < kPanel; ++column) sum[i][column] = 0.0f;
  }
  const bool along_dests = view.dest_stride == 1;
  const int fast = lane % kPanel, slow = lane / kPanel;
  const int64_t slow_stride = 2 * (along_dests ? view.source_stride : view.dest_stride);
  EdgeFlags flags;
  for (int64_t source = warp * kPanel; source < panel; source += kWarps * kPanel) {
    const Steps steps = Steps::between(view.shape, source, source + kPanel, panel, panel + width);
    if (at_most(steps.end, first_row + kWarp * kRowsPerLane) <= at_least(steps.first, first_row)) continue;
    // the lanes of half a warp read neighbours in memory: destinations forwards, sources backwards
    const Element* from = view.edge(source + (along_dests ? slow : fast), panel + (along_dests ? fast : slow));
    float log_edges[kPanel / 2];
#pragma unroll
    for (int i = 0; i < kPanel / 2; ++i) {
      log_edges[i] = (along_dests ? fast : slow + 2 * i) < width ? to_float(from[i * slow_stride]) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kPanel / 2; ++i) {
      float* to = along_dests ? &shared.edges[warp][slow + 2 * i][fast] : &shared.edges[warp][fast][slow + 2 * i];
      *to = linear_edge(log_edges[i], flags);
    }
    __syncwarp();
    bool is_live[kRowsPerLane];  // the same for all lanes
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int64_t first = first_row + i * kWarp;
      is_live[i] = at_most(steps.end, first + kWarp) > at_least(steps.first, first);
    }
    // a lane beyond the last slot reads the next column, or the peaks after the last one, and its result is not used
    const float* mantissa = columns.mantissa + source * columns.rows + first_row + lane;
    const int32_t* exponent = columns.exponent + source * columns.rows + first_row + lane;
    for (int first = 0; first < kPanel; first += kBatch) {
      Number alpha[kRowsPerLane][kBatch];  // all loads of a batch before their first use
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) alpha[i][k] = {mantissa[i * kWarp], exponent[i * kWarp]};
        mantissa += columns.rows;
        exponent += columns.rows;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        Quad edges[kQuads];
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          edges[quad] = reinterpret_cast<const Quad*>(shared.edges[warp][first + k])[quad];
        }
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
          if (!is_live[i]) continue;
          const int32_t below_peak = alpha[i][k].exponent - peak[i];
          is_faint[i] |= is_faint_exponent(below_peak);
          const float value = alpha[i][k].mantissa * pow2(below_peak);
#pragma unroll
          for (int column = 0; column < kPanel; ++column) {
            sum[i][column] += value * edges[column / 4].values[column % 4];
          }
        }
      }
    }
    __syncwarp();
  }
  flags.publish(shared);
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    if (is_faint[i]) shared.is_faint_row[i * kWarp + lane] = 1;
#pragma unroll
    for (int column = 0; column < kPanel; ++column) shared.sums[warp][column][i * kWarp + lane] = sum[i][column];
  }
}

// Step 2 for the same slots. Writes the peaks, including those of this panel, to next_peaks.
template <class Element, int kRowsPerLane>
SA_DEVICE void solve_panel(const View<Element>& view, const DeviceColumns& columns, const int32_t* peaks,
                           int32_t* next_peaks, int64_t panel, int64_t width, int64_t first_row,
                           SweepShared<kRowsPerLane>& shared) {
  using F = Format<float>;
  constexpr int kRows = SweepShared<kRowsPerLane>::kRows;
  const int thread = static_cast<int>(threadIdx.x), parity = static_cast<int>(first_row / kRows % 2);
  const int rows = static_cast<int>(columns.rows), step = static_cast<int>(first_row) + thread;
  const int64_t last_column = view.shape.states - 1;
  const bool is_active = thread < kRows && step < rows;
  static_assert(kRows < kThreads, "one thread is left to bring what comes before the first slot");
  float sum[kPanel];
  Number emission[kPanel];
  int32_t scale = kDead, peak = kDead, next_peak = kDead;  // sums are relative to 2^scale, peak is the largest source
  bool is_faint = false;
  if (is_active) {
    scale = peak = peaks[step];
    is_faint = shared.is_faint_row[thread] != 0;
#pragma unroll
    for (int i = 0; i < kPanel; ++i) {
      sum[i] = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum[i] += shared.sums[warp][i][thread];
      const int64_t column = panel + i;
      const bool emits = column > 0 && column < last_column && step < view.shape.targets;
      const float log_emission = emits ? to_float(*view.emission(column, step)) : -INFINITY;
      if (is_invalid(log_emission)) shared.is_invalid = 1;
      emission[i] = column == last_column ? Number{1.0f, 0} : exp_of(log_emission);
    }
  }
  const bool has_faint_edge = shared.has_faint_edge != 0, has_steep_edge = shared.has_steep_edge != 0;
  float* mantissa = columns.mantissa + panel * rows + step + 1;
  int32_t* exponent = columns.exponent + panel * rows + step + 1;
#pragma unroll
  for (int i = 0; i < kPanel; ++i) {
    if (i >= width) break;
    const int64_t column = panel + i;
    if (is_active) {
      Number reach{sum[i], scale};
      const bool is_small = sum[i] < pow2(F::kLeastSum + peak - scale) && (is_faint || has_faint_edge);
      // other slots lie on no complete path, and products have skipped them
      const bool counts = Steps::into(view.shape, column).has(step);
      if (peak > kDead && counts && (is_small || has_steep_edge)) reach = exact_sum(view, columns, column, step);
      const Number alpha = normal(reach.mantissa * emission[i].mantissa, reach.exponent + emission[i].exponent);
      next_peak = larger<ScalarLane<float>>(next_peak, alpha.exponent);
      shared.passed[i & 1][thread + 1] = alpha;
      if (thread == kRows - 1) shared.last_passed[parity][i] = alpha;
      if (column == last_column) {
        // the likelihood stays at the step that reaches the end node
        columns.put(column, step, alpha);
      } else if (step + 1 < rows) {
        *mantissa = alpha.mantissa;
        *exponent = alpha.exponent;
      }
      mantissa += rows;
      exponent += rows;
    } else if (thread == kRows) {
      // a thread without a slot supplies the one before the first: slot 0 is dead except at the start
      const Number before =
          first_row > 0 ? shared.last_passed[1 - parity][i] : column == 0 ? Number{1.0f, 0} : zero();
      shared.passed[i & 1][0] = before;
      if (first_row == 0 && column < last_column) columns.put(column, 0, before);
    }
    __syncthreads();
    if (is_active) {
      const Number source = shared.passed[i & 1][thread];
      if (source.exponent > scale + F::kWide) {
        const float factor = pow2(scale - source.exponent);
#pragma unroll
        for (int j = i + 1; j < kPanel; ++j) sum[j] *= factor;
        is_faint |= scale > kDead;
        scale = source.exponent;
      }
      const float value = source.mantissa * pow2(source.exponent - scale);
      is_faint |= is_faint_exponent(source.exponent - scale);
      peak = larger<ScalarLane<float>>(peak, source.exponent);
#pragma unroll
      for (int j = i + 1; j < kPanel; ++j) sum[j] += value * shared.panel_edges[i][j];
    }
  }
  if (is_active) {
    if (step + 1 < rows) next_peaks[step + 1] = larger<ScalarLane<float>>(peaks[step + 1], next_peak);
    if (step == 0) next_peaks[0] = 0;  // the start
  }
}

// Block b * num_sweeps + sweep: sweep 0 fills alpha and nll[b], sweep 1 beta.
//
// With one slot per lane two blocks share a multiprocessor, so that one works while the other waits; the registers
// for both cost a few spills. Three slots per lane need all registers.
template <class Element, int kRowsPerLane>
SA_KERNEL_PER_SM(kRowsPerLane == 1 ? 2 : 1)
void sweep_kernel(const states_alignment_batch batch, float* nll, int32_t* saved, int num_sweeps) {
  using Shared = SweepShared<kRowsPerLane>;
  SA_SHARED_MEMORY(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t b = blockIdx.x / num_sweeps;
  const bool is_forward = blockIdx.x % num_sweeps == 0;
  const Shape shape = shape_of(batch, b);
  if (!shape.has_path()) {
    if (is_forward && thread == 0) nll[b] = INFINITY;
    return;
  }
  const View<Element> view =
      view_of<Element>(batch, b, shape, is_forward ? Direction::kForward : Direction::kBackward);
  DeviceColumns columns = DeviceColumns::in(saved, blockIdx.x, batch);
  columns.rows = shape.rows(STATES_ALIGNMENT_ROW_PAD);
  for (int64_t row = thread; row < 2 * columns.rows; row += kThreads) columns.peaks[row] = kDead;
  if (thread == 0) shared.is_invalid = 0;
  for (int64_t panel = 0; panel < shape.states; panel += kPanel) {
    const int64_t width = at_most(kPanel, shape.states - panel);
    const int32_t* peaks = columns.peaks + panel / kPanel % 2 * columns.rows;
    int32_t* next_peaks = columns.peaks + (panel / kPanel + 1) % 2 * columns.rows;
    if (thread == 0) shared.has_faint_edge = shared.has_steep_edge = 0;
    __syncthreads();
    if (thread < kPanel * kPanel) {
      const int v = thread / kPanel, u = thread % kPanel;
      EdgeFlags flags;
      const float log_edge = v < u && u < width ? to_float(*view.edge(panel + v, panel + u)) : -INFINITY;
      shared.panel_edges[v][u] = linear_edge(log_edge, flags);
      flags.publish(shared);
    }
    for (int64_t first_row = 0; first_row < columns.rows; first_row += Shared::kRows) {
      if (thread < Shared::kRows) shared.is_faint_row[thread] = 0;
      __syncthreads();
      add_products(view, columns, peaks, panel, width, first_row, shared);
      __syncthreads();
      solve_panel(view, columns, peaks, next_peaks, panel, width, first_row, shared);
    }
    __syncthreads();
  }
  if (is_forward && thread == 0) {
    Number likelihood = columns.at(shape.states - 1, shape.targets);
    if (shared.is_invalid) {
      likelihood.mantissa = NAN;
      columns.put(shape.states - 1, shape.targets, likelihood);
    }
    nll[b] = likelihood.mantissa == 0.0f
                 ? INFINITY
                 : static_cast<float>(-(log(static_cast<double>(likelihood.mantissa)) +
                                        static_cast<double>(likelihood.exponent) * 0.6931471805599453));
  }
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SWEEP_CUDA_CUH_
