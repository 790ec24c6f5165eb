// View of one sequence of a batch for the host kernels, and the scratch memory of one thread.
#ifndef STATES_ALIGNMENT_SEQUENCE_CPU_H_
#define STATES_ALIGNMENT_SEQUENCE_CPU_H_

#include <algorithm>
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

// Vectors of slots, [first, end), by their first slot.
struct Rows {
  int64_t first;
  int64_t end;

  bool has(int64_t row) const { return first <= row && row < end; }
  // Those of the columns [first, end): the steps into them and, since each step moves up by one slot, all their slots.
  static Rows of(const Shape& shape, int64_t column, int64_t column_end, int64_t width) {
    const int64_t first = Steps::into(shape, column).first, end = Steps::into(shape, column_end - 1).end;
    return {first / width * width, std::min(end / width * width + width, shape.rows(kRowPad))};
  }
};

// Layout of the vectors of slots of columns: by column within a row of vectors, one row after the other. Only the
// vectors of a band near the diagonal are used, so rows may overlap elsewhere.
struct BandLayout {
  int64_t row_stride;  // elements from a vector to the one of the next slots of its column
  int64_t origin;      // element of the first slots of column 0
  int64_t size;        // elements

  // For columns in blocks, with `margin` more vectors on both sides of those of Rows::of.
  static BandLayout of(const Shape& shape, int64_t width, int64_t margin) {
    const int64_t num_rows = shape.rows(kRowPad) / width;
    // column - row is -(kBlock - 1) to states - targets + width + kBlock - 3 for vectors of Rows::of
    const int64_t before = kBlock - 1 + margin * width;
    const int64_t band = shape.states - shape.targets + width + 2 * kBlock - 3 + 2 * margin * width;
    const int64_t columns = round_up(shape.states, kBlock);
    const bool is_band = band < columns;
    // an odd number of vectors, so that those of two rows do not compete for the same places in L1
    const int64_t stride = ((is_band ? band - width : columns) | 1) * width;
    return {stride, is_band ? before * width : 0,
            (num_rows - 1) * (stride + (is_band ? width * width : 0)) + (is_band ? band : columns) * width};
  }
};

// Scaled numbers by column and slot; rows of them as wide as the vectors of this build.
template <class RealType>
struct Columns {
  using Real = RealType;
  using Int = typename Format<Real>::Int;
  static constexpr int64_t kWidth = SimdLane<Real>::kWidth;
  Real* mantissa;  // of the first slots of column 0
  Int* exponent;
  int64_t row_stride;

  static BandLayout layout_of(const Shape& shape) { return BandLayout::of(shape, kWidth, 0); }
  // Columns of one sequence at the beginning of memory that holds as many numbers as its layout has.
  static Columns in(Real* mantissas, Int* exponents, const Shape& shape) {
    const BandLayout layout = layout_of(shape);
    return {mantissas + layout.origin, exponents + layout.origin, layout.row_stride};
  }

  int64_t place(int64_t column, int64_t row) const { return row / kWidth * row_stride + column * kWidth; }
  Real* mantissas(int64_t column, int64_t row) const { return mantissa + place(column, row); }
  Int* exponents(int64_t column, int64_t row) const { return exponent + place(column, row); }
  Scaled<ScalarLane<Real>> at(int64_t column, int64_t slot) const {
    return {mantissas(column, slot)[slot % kWidth], exponents(column, slot)[slot % kWidth]};
  }
};

// Exponentiated edges from the nodes of some rows of the matrix to those of some columns, as plain numbers.
template <class Real>
struct EdgeTile {
  const Real* values;
  int64_t row_stride;
  int64_t first_place;  // of the edge from node 0 to node 0
  Real largest_log;     // of their scores, and at least 0

  const Real* at(int64_t node, int64_t dest) const { return values + (first_place + node * row_stride + dest); }
};

template <class RealType>
struct Sequence {
  using Real = RealType;
  const Real* log_emit;
  const Real* log_trans;
  int64_t emit_row_stride;
  int64_t trans_row_stride;
  Shape shape;

  // Log scores of the edges from `node` to as many nodes from `dest` on as are in a vector; -inf where there is none.
  typename SimdLane<Real>::Real edges(int64_t node, int64_t dest) const {
    using Lane = SimdLane<Real>;
    using Int = typename Lane::ScalarInt;
    constexpr Real kNoEdge = -std::numeric_limits<Real>::infinity();
    const Real* from = log_trans + node * trans_row_stride + dest;
    const int64_t left = shape.states - dest;
    typename Lane::Real result;
    if (left >= Lane::kWidth) {
      result = Lane::load(from);
    } else if (left > 0 && node < shape.states - 1 && trans_row_stride >= Lane::kWidth) {
      // memory behind a row belongs to the next one and may hold anything
      result = Lane::counted() < static_cast<Int>(left) ? Lane::load(from) : Lane::splat(kNoEdge);
    } else {
      result = Lane::load(from, std::max<int64_t>(left, 0), kNoEdge);
    }
    // entries at and below the diagonal may hold anything too
    return dest > node ? result : Lane::counted() > static_cast<Int>(node - dest) ? result : Lane::splat(kNoEdge);
  }

  View<Real> view(Direction direction) const {
    return View<Real>::of(log_emit, emit_row_stride, log_trans, trans_row_stride, shape, direction);
  }
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SEQUENCE_CPU_H_
