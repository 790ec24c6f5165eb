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

  View<Real> view(Direction direction) const {
    return View<Real>::of(log_emit, emit_row_stride, log_trans, trans_row_stride, shape, direction);
  }
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SEQUENCE_CPU_H_
