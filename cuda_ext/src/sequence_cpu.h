// One sequence of a batch as the host kernels see it, and the scratch memory of one thread.
#ifndef STATES_ALIGNMENT_SEQUENCE_CPU_H_
#define STATES_ALIGNMENT_SEQUENCE_CPU_H_

#include <limits>
#include <new>

#include "lattice.h"
#include "simd.h"
#include "../include/states_alignment.h"

namespace states_alignment {

constexpr int64_t kRowPad = STATES_ALIGNMENT_ROW_PAD;
constexpr int64_t kChunk = 64;  // source columns, or steps, of one block product: its packed operands stay in L1

// Memory for `count` values, aligned to vectors, not initialised.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(static_cast<T*>(::operator new(bytes(count), kAlignment))) {}
  ~Buffer() { ::operator delete(data_, kAlignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  static size_t bytes(int64_t count) { return static_cast<size_t>(count) * sizeof(T); }
  T* data_;
};

// Scaled numbers by column: element (column, slot) is at column * rows + slot.
template <class RealType>
struct Columns {
  using Real = RealType;
  using Int = typename Format<Real>::Int;
  Real* mantissa;
  Int* exponent;
  int64_t rows;

  Real* mantissas(int64_t column) const { return mantissa + column * rows; }
  Int* exponents(int64_t column) const { return exponent + column * rows; }
  Scaled<ScalarLane<Real>> at(int64_t column, int64_t slot) const {
    return {mantissas(column)[slot], exponents(column)[slot]};
  }
};

template <class RealType>
struct Sequence {
  using Real = RealType;
  const Real* log_emit;
  const Real* log_trans;
  int64_t emit_row_stride;
  int64_t trans_row_stride;
  Shape shape;
};

// A sequence read in one direction: column c is node c, or node S - 1 - c from the end.
template <class Real, Direction kDirection>
struct Oriented {
  const Sequence<Real>& sequence;

  int64_t node(int64_t column) const {
    return kDirection == Direction::kForward ? column : sequence.shape.states - 1 - column;
  }
  // Address of the edge from column `source` to column `dest`, and what to add for the next column of each.
  const Real* edge(int64_t source, int64_t dest) const {
    const bool forward = kDirection == Direction::kForward;
    const int64_t from = forward ? source : node(dest), to = forward ? dest : node(source);
    return sequence.log_trans + from * sequence.trans_row_stride + to;
  }
  int64_t next_source() const { return kDirection == Direction::kForward ? sequence.trans_row_stride : -1; }
  int64_t next_dest() const { return kDirection == Direction::kForward ? 1 : -sequence.trans_row_stride; }

  // Address of what the node in `column` gives the target emitted at step t; add next_step() for the next step.
  const Real* emission(int64_t column, int64_t step) const {
    const int64_t target = kDirection == Direction::kForward ? step : sequence.shape.targets - 1 - step;
    return sequence.log_emit + target * sequence.emit_row_stride + node(column);
  }
  int64_t next_step() const {
    return kDirection == Direction::kForward ? sequence.emit_row_stride : -sequence.emit_row_stride;
  }
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SEQUENCE_CPU_H_
