// What can matter in the lattice of one sequence, nodes by slots, shared by host and device.
//
// The recursion runs over nodes, all slots at once, not over targets: node u needs only nodes v < u, and no node feeds
// itself, so all its slots can be summed together. Every edge is then exponentiated once a sweep, and nearly all of the
// work is a triangular solve, (slots x nodes) times (nodes x nodes) products, in place of T matrix-vector products.
//
// Both sweeps use it. The backward sweep is the forward one of the DAG read from its end: column c is node S - 1 - c,
// slot t counts the targets after it.
#ifndef STATES_ALIGNMENT_LATTICE_H_
#define STATES_ALIGNMENT_LATTICE_H_

#include <stdint.h>

#include "log_math.h"

namespace states_alignment {

constexpr int kBlock = 8;  // columns that the host solves together

enum class Direction { kForward, kBackward };

SA_HOST_DEVICE int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
SA_HOST_DEVICE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
SA_HOST_DEVICE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Size of one sequence and which slots of a column can lie on a whole path: the rest is never computed.
struct Shape {
  int64_t targets;  // T
  int64_t states;   // S

  SA_HOST_DEVICE bool has_path() const { return targets >= 1 && states - 2 >= targets; }
  // Rows for the slots 0 .. T of a column or the steps 0 .. T: step t is taken after t targets, step T into the end.
  SA_HOST_DEVICE int64_t rows(int64_t padding) const { return round_up(targets + 1, padding); }

  // Column c holds at least one target unless it is the start, and leaves no more than the columns after it can take.
  SA_HOST_DEVICE int64_t first_slot(int64_t column) const {
    return at_least(column == 0 ? 0 : 1, targets - (states - 2 - column));
  }
  SA_HOST_DEVICE int64_t last_slot(int64_t column) const {
    return at_most(column == states - 1 ? targets + 1 : targets, column);
  }
};

// Half-open range of columns before the end that can hold probability in some of the slots [slot, slot_end).
struct Alive {
  int64_t first;
  int64_t end;

  SA_HOST_DEVICE bool empty() const { return end <= first; }
  SA_HOST_DEVICE Alive among(int64_t column, int64_t column_end) const {
    return {at_least(first, column), at_most(end, column_end)};
  }
  SA_HOST_DEVICE static Alive at(const Shape& shape, int64_t slot, int64_t slot_end) {
    return {slot, at_most(slot_end + shape.states - 2 - shape.targets, shape.states - 1)};
  }
};

// A sequence read in one direction. Element is how log probabilities are stored.
template <class Element>
struct View {
  const Element* edges;  // address of the edge from column v to column u: edges + v * source_stride + u * dest_stride
  int64_t source_stride;
  int64_t dest_stride;
  const Element* emissions;  // of column c, taken at step t: emissions + t * step_stride + c * column_stride
  int64_t step_stride;
  int64_t column_stride;
  Shape shape;

  SA_HOST_DEVICE static View of(const Element* log_emit, int64_t emit_row_stride, const Element* log_trans,
                                int64_t trans_row_stride, Shape shape, Direction direction) {
    if (direction == Direction::kForward) {
      return {log_trans, trans_row_stride, 1, log_emit, emit_row_stride, 1, shape};
    }
    const int64_t last = shape.states - 1;
    return {log_trans + last * trans_row_stride + last,
            -1,
            -trans_row_stride,
            log_emit + (shape.targets - 1) * emit_row_stride + last,
            -emit_row_stride,
            -1,
            shape};
  }
  SA_HOST_DEVICE const Element* edge(int64_t source, int64_t dest) const {
    return edges + source * source_stride + dest * dest_stride;
  }
  SA_HOST_DEVICE const Element* emission(int64_t column, int64_t step) const {
    return emissions + step * step_stride + column * column_stride;
  }
};

// Half-open range of steps t at which edges from columns [source, source_end) to [dest, dest_end) can be taken.
struct Steps {
  int64_t first;
  int64_t end;

  SA_HOST_DEVICE bool empty() const { return end <= first; }
  SA_HOST_DEVICE Steps among(Steps others) const { return {at_least(first, others.first), at_most(end, others.end)}; }
  SA_HOST_DEVICE bool has(int64_t step) const { return first <= step && step < end; }
  SA_HOST_DEVICE static Steps between(const Shape& shape, int64_t source, int64_t source_end, int64_t dest,
                                      int64_t dest_end) {
    return {at_least(shape.first_slot(source), shape.first_slot(dest) - 1),
            at_most(shape.last_slot(source_end - 1), shape.last_slot(dest_end - 1) - 1) + 1};
  }
  SA_HOST_DEVICE static Steps into(const Shape& shape, int64_t dest) {
    return {at_least(shape.first_slot(dest) - 1, 0), shape.last_slot(dest)};
  }
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_LATTICE_H_
