// One sweep over one sequence on the host: alpha forwards, or beta (with its own emission) backwards.
//
// Columns are solved one after the other, all slots at once, in blocks of kBlock. The sums over all edges into a block
// are computed just before it, by products of vectors of slots. A product takes alpha relative to a reference of each
// slot, a power of two near the largest alpha there so far, so that sums over earlier columns need neither exponents
// nor normalising; alpha itself is also kept as a scaled number of any magnitude. Where a sum may have lost terms,
// or an alpha is far from its reference, a vector of slots is solved again with the exponents of every term.
#ifndef STATES_ALIGNMENT_SWEEP_CPU_H_
#define STATES_ALIGNMENT_SWEEP_CPU_H_

#include <algorithm>

#include "block_product.h"
#include "prefetch.h"
#include "sequence_cpu.h"

namespace states_alignment {

constexpr int64_t kPanel = 64;   // columns whose incoming edges are exponentiated together
constexpr int64_t kChunk = 192;  // sources of these edges at a time: such a tile fits L2

// Scratch memory of a sweep; the arguments are upper bounds over all sequences that use it.
template <class Real>
struct SweepScratch {
  using Int = typename Format<Real>::Int;
  static constexpr int64_t kWidth = SimdLane<Real>::kWidth;
  static constexpr int64_t kGroup = kWidth > kBlock ? kWidth : kBlock;  // columns whose emissions are read at once

  SweepScratch(int64_t rows, int64_t states, int64_t relative_size)
      : relative(relative_size), references(rows + kWidth), peaks(rows), may_be_faint(rows), emission(kGroup * rows),
        edges(std::max(kPanel * row_stride(kChunk), kChunk * row_stride(kPanel))),
        edge_mantissas(states * kBlock + kWidth), edge_exponents(states * kBlock + kWidth) {}
  static BandLayout relative_layout(const Shape& shape) { return BandLayout::of(shape, kWidth, kProductVectors - 1); }
  // Size of a row of `count` edges: an odd number of cache lines, so that rows do not compete for the same L1 sets.
  static constexpr int64_t row_stride(int64_t count) { return count + 64 / static_cast<int64_t>(sizeof(Real)); }
  Buffer<Real> relative;     // alpha / 2^reference; for later columns the sums so far
  Buffer<Int> references;    // of each slot; kDead before any column is alive there
  Buffer<Int> peaks;         // of each slot: the largest exponent of all alphas so far
  Buffer<Int> may_be_faint;  // by slot: all bits, where an alpha that is alive may be below 2^-kWide of its reference
  Buffer<Real> emission;     // [column of the group][step]; after a step is solved, its kept values
  Buffer<Real> edges;        // of one tile, by row of the matrix
  Buffer<Real> edge_mantissas;  // [source][lane] of the edges into the present block, for exact sums
  Buffer<Int> edge_exponents;
};

// Observer of a sweep that does nothing. An observer of every sum sets kKeeps and also has
//
//     Vec keep(column, row, reach)           the sums at the vector of steps from `row` on into a column, before its
//                                            own emission; returns the values to keep, zero where nothing is emitted
//     void write_kept(node, step, values)    the kept values of kWidth nodes from `node` on, which may not all exist
//
struct NoObserver {
  static constexpr bool kKeeps = false;
  // Columns [first, end), a panel, are solved next.
  void begin(int64_t, int64_t) const {}
  // The edges from columns [source, source_end), which are solved, to those of the panel.
  template <class Tile>
  void see_edges(int64_t, int64_t, int64_t, int64_t, const Tile&) const {}
};

template <class RealType, Direction kDirection, class Observer>
class Sweep {
 public:
  using Real = RealType;
  using Lane = SimdLane<Real>;
  using F = Format<Real>;
  using Int = typename F::Int;
  using Vec = typename Lane::Real;
  using IntVec = typename Lane::Int;
  static constexpr int kWidth = Lane::kWidth;
  static constexpr int64_t kGroup = SweepScratch<Real>::kGroup;
  static constexpr bool kByDest = kDirection == Direction::kBackward;

  Sweep(const Sequence<Real>& sequence, const Columns<Real>& columns, SweepScratch<Real>& scratch, Observer& observer)
      : view_(sequence.view(kDirection)), sequence_(sequence), shape_(sequence.shape), columns_(columns),
        scratch_(scratch), observer_(observer) {
    const BandLayout layout = scratch.relative_layout(shape_);
    relative_ = scratch.relative.get() + layout.origin;
    relative_stride_ = layout.row_stride;
  }

  // Fills all columns, each at the slots of Rows::of its block. The end column holds the likelihood at slot T; in every
  // other column, slot t holds the probability of the paths to (from) this node that have emitted t targets, its own
  // included.
  void run() {
    const int64_t num_slots = shape_.rows(kRowPad);
    std::fill_n(scratch_.references.get(), num_slots + kWidth, Int{kDead});
    std::fill_n(scratch_.peaks.get(), num_slots, Int{kDead});
    std::fill_n(scratch_.may_be_faint.get(), num_slots, Int{0});
    for (int64_t first = 0; first < shape_.states; first += kPanel) {
      const int64_t end = std::min(first + kPanel, shape_.states);
      observer_.begin(first, end);
      has_faint_ = has_steep_ = false;
      for (int64_t source = 0; source < first; source += kChunk) {
        const int64_t source_end = std::min(source + kChunk, first);
        exponentiate_edges(source, source_end, first, end);
        const bool is_last = source_end == first;
        expect_edges(source_end, is_last ? end : std::min(source_end + kChunk, first), first, end);
        for (int64_t dest = first; dest < end; dest += kBlock) {
          collect(source, source_end, dest, std::min(dest + kBlock, end));
        }
        observer_.see_edges(source, source_end, first, end, tile_);
      }
      exponentiate_edges(first, end, first, end);
      const int64_t next_end = std::min(end + kPanel, shape_.states);
      expect_edges(0, std::min(end, kChunk), end, next_end);
      expect_emissions(end, next_end);
      for (int64_t group = first; group < end; group += kGroup) {
        const int64_t group_end = std::min(group + kGroup, end);
        read_emissions(group, group_end);
        for (int64_t dest = group; dest < group_end; dest += kBlock) {
          emission_ = scratch_.emission.get() + (dest - group) * num_slots;
          solve(first, end, dest, std::min(dest + kBlock, end));
        }
        if constexpr (Observer::kKeeps) write_kept(group, group_end);
      }
      observer_.see_edges(first, end, first, end, tile_);
    }
  }

  // Whether the sweep has read a NaN or a value that is not a log probability.
  bool is_invalid() const { return is_invalid_; }

 private:
  Rows rows_of(int64_t first, int64_t end) const { return Rows::of(shape_, first, end, kWidth); }

  // Values that pass from one vector of slots of a block to the next: the products with emissions, whose last lane is
  // an alpha of the next vector.
  struct Carry {
    Vec relative[kBlock];  // to the reference of that slot
    Scaled<Lane> exact[kBlock];
    bool is_exact;  // which of the two holds them
  };

  Real* relative(int64_t row, int64_t column) const {
    return relative_ + row / kWidth * relative_stride_ + column * kWidth;
  }

  // Adds the sums over columns [source, source_end) to the columns [dest, dest_end) of one block.
  void collect(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    const Rows rows = rows_of(dest, dest_end);
    int64_t row = rows.first;
    for (; row + kProductVectors * kWidth <= rows.end; row += kProductVectors * kWidth) {
      collect<kProductVectors>(source, source_end, dest, dest_end, row);
    }
    for (; row < rows.end; row += kWidth) collect<1>(source, source_end, dest, dest_end, row);
  }
  template <int kVectors>
  void collect(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end, int64_t row) {
    next_edges_.ask();
    Vec sums[kVectors][kBlock];
    if (source == 0) {
      clear(sums);
    } else {
      load_sums(dest, row, sums);
    }
    multiply(source, source_end, dest, row, sums);
    for (int vector = 0; vector < kVectors; ++vector) {
      for (int64_t column = dest; column < dest_end; ++column) {
        Lane::store(relative(row + vector * kWidth, column), sums[vector][column - dest]);
      }
    }
  }

  template <int kVectors>
  static void clear(Vec (&sums)[kVectors][kBlock]) {
    for (int vector = 0; vector < kVectors; ++vector) {
      for (int lane = 0; lane < kBlock; ++lane) sums[vector][lane] = Lane::splat(0);
    }
  }
  template <int kVectors>
  void load_sums(int64_t dest, int64_t row, Vec (&sums)[kVectors][kBlock]) const {
    for (int vector = 0; vector < kVectors; ++vector) {
      for (int lane = 0; lane < kBlock; ++lane) {
        sums[vector][lane] = Lane::load(relative(row + vector * kWidth, dest + lane));
      }
    }
  }

  // Adds the sums over those columns of [source, source_end) that are alive in these slots.
  template <int kVectors>
  void multiply(int64_t source, int64_t source_end, int64_t dest, int64_t row, Vec (&sums)[kVectors][kBlock]) const {
    const Alive alive = Alive::at(shape_, row, row + kVectors * kWidth).among(source, source_end);
    if (alive.empty()) return;
    block_product<Lane, kVectors>(relative(row, alive.first), relative_stride_, edge(alive.first, dest), edge_strides(),
                                  alive.end - alive.first, sums);
  }
  // Strides of the exponentiated edges, by source and by destination.
  ScalarStrides edge_strides() const {
    return kByDest ? ScalarStrides{-1, -tile_.row_stride} : ScalarStrides{tile_.row_stride, 1};
  }

  // Completes the columns [first, end) of one block, whose sums over all columns before `panel` are complete.
  void solve(int64_t panel, int64_t panel_end, int64_t first, int64_t end) {
    first_scaled_ = end;
    Carry carry;
    carry.is_exact = false;
    for (Vec& products : carry.relative) products = Lane::splat(0);
    for (Scaled<Lane>& products : carry.exact) products = {Lane::splat(0), Lane::splat_int(kDead)};
    const Rows rows = rows_of(first, end);
    int64_t row = rows.first;
    for (; row + kProductVectors * kWidth <= rows.end; row += kProductVectors * kWidth) {
      solve<kProductVectors>(panel, panel_end, first, end, row, carry);
    }
    for (; row < rows.end; row += kWidth) solve<1>(panel, panel_end, first, end, row, carry);
    // products of several vectors also read the one before and the one after
    for (int64_t column = first; column < end; ++column) {
      if (rows.first > 0) Lane::store(relative(rows.first - kWidth, column), Lane::splat(0));
      if (rows.end < shape_.rows(kRowPad)) Lane::store(relative(rows.end, column), Lane::splat(0));
    }
  }
  template <int kVectors>
  void solve(int64_t panel, int64_t panel_end, int64_t first, int64_t end, int64_t row, Carry& carry) {
    next_edges_.ask();
    next_emissions_.ask();
    Vec sums[kVectors][kBlock];
    if (panel == 0) {
      clear(sums);
    } else {
      load_sums(first, row, sums);
    }
    multiply(panel, first, first, row, sums);
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t vector_row = row + vector * kWidth;
      const bool is_full = end - first == kBlock && end < shape_.states;
      const bool is_solved =
          is_full ? solve_relative<true>(panel_end, first, end, vector_row, sums[vector], carry)
                  : solve_relative<false>(panel_end, first, end, vector_row, sums[vector], carry);
      if (!is_solved) solve_exactly(panel_end, first, end, vector_row, sums[vector], carry);
    }
  }

  // Completes one vector of slots of a block relative to their references; returns false, with nothing done, if a
  // number is too far from them. kIsFull: kBlock columns, none of them the end.
  //
  // Sums of at least least_sums() have lost nothing that matters. The largest alphas allowed, 2^(2 kWide - kSteep),
  // still give finite sums over the edges of a block.
  template <bool kIsFull>
  bool solve_relative(int64_t panel_end, int64_t first, int64_t end, int64_t row, const Vec (&sums)[kBlock],
                      Carry& carry) {
    if (first == 0 || has_steep_ || (carry.is_exact && !make_relative(row, carry))) return false;
    const int count = kIsFull ? kBlock : static_cast<int>(end - first);
    const int end_lane = kIsFull ? kBlock : static_cast<int>(shape_.states - 1 - first);
    const IntVec reference = Lane::load_int(scratch_.references.get() + row);
    const IntVec to_next = reference - Lane::load_int(scratch_.references.get() + row + 1);
    const Real* const edges = edge(first, first);
    const ScalarStrides strides = edge_strides();
    Real* const emissions = emission(0, row);
    const int64_t num_slots = shape_.rows(kRowPad);
    Vec products[kBlock] = {}, alpha[kBlock] = {}, kept[kBlock] = {};
    Vec least = Lane::splat(1), largest = Lane::splat(0);
    IntVec highest = Lane::splat_int(0);
#pragma GCC unroll 8
    for (int lane = 0; lane < kBlock; ++lane) {
      if (lane >= count) break;
      Vec reach = sums[lane];
#pragma GCC unroll 8
      for (int source = 0; source < lane; ++source) {
        reach += alpha[source] * edges[source * strides.by_term + lane * strides.by_column];
      }
      if (lane == end_lane) {
        const IntVec is_end = Lane::counted() == static_cast<Int>(shape_.targets - row);
        least = is_end & (reach < least) ? reach : least;
        alpha[lane] = reach;
        continue;
      }
      // slot t + 1 becomes the sum at step t times the emission there
      const Scaled<Lane> emitted = scaled_exp<Lane>(Lane::load(emissions + lane * num_slots));
      const IntVec exponent = emitted.exponent + to_next;
      const IntVec is_alive = emitted.exponent > kDead;
      if constexpr (Observer::kKeeps) {
        kept[lane] = is_alive ? observer_.keep(first + lane, row, Scaled<Lane>{reach, reference}) : Lane::splat(0);
      }
      highest = is_alive & (exponent > highest) ? exponent : highest;
      const Vec product = reach * (emitted.mantissa * power_of_two<Lane>(exponent));
      const Vec smaller = reach < product ? reach : product;
      least = is_alive & (smaller < least) ? smaller : least;
      largest = product > largest ? product : largest;
      products[lane] = product;
      alpha[lane] = Lane::moved_up(carry.relative[lane], product);
    }
    Vec lower = least_sums(row, -F::kWide);
    for (int lane = 0; has_faint_ && lane < count; ++lane) {
      const Vec least_beside = alpha[lane] * power_of_two<ScalarLane<Real>>(F::kLeastShare);
      lower = least_beside > lower ? least_beside : lower;
    }
    const Real upper = power_of_two<ScalarLane<Real>>(2 * F::kWide - F::kSteep);
    if (Lane::any((least < lower) | ~(largest < upper) | (highest > F::kBias - 2))) return false;
    IntVec peak = Lane::splat_int(kDead);
    Real* const mantissas = columns_.mantissas(first, row);
    Int* const exponents = columns_.exponents(first, row);
    Real* const relatives = relative(row, first);
#pragma GCC unroll 8
    for (int lane = 0; lane < kBlock; ++lane) {
      if (lane >= count) break;
      const Scaled<Lane> scaled = normalized<Lane>(alpha[lane], reference);
      Lane::store(mantissas + lane * kWidth, scaled.mantissa);
      Lane::store_int(exponents + lane * kWidth, scaled.exponent);
      Lane::store(relatives + lane * kWidth, alpha[lane]);
      carry.relative[lane] = products[lane];
      if constexpr (Observer::kKeeps) Lane::store(emissions + lane * num_slots, kept[lane]);
      if (lane < end_lane) peak = larger<Lane>(peak, scaled.exponent);
    }
    if (raise_references(panel_end, first, end, row, peak)) store_relative(first, end, row);
    return true;
  }

  // Whether the alphas that enter the vector at `row` from the one before are near its reference; if so, makes them
  // relative to it.
  bool make_relative(int64_t row, Carry& carry) const {
    const Int reference = scratch_.references.get()[row];
    IntVec is_far = Lane::splat_int(0);
    for (int lane = 0; lane < kBlock; ++lane) {
      const IntVec exponent = carry.exact[lane].exponent - reference;
      is_far |= (carry.exact[lane].exponent > kDead) & ((exponent >= F::kWide) | (exponent < -F::kWide));
      carry.relative[lane] =
          carry.exact[lane].mantissa * power_of_two<Lane>(exponent < F::kWide ? exponent : Lane::splat_int(F::kWide));
    }
    if (is_far[kWidth - 1]) return false;
    carry.is_exact = false;
    return true;
  }

  // Does what solve_relative does at any magnitude; then raises small references and rescales what depends on them.
  void solve_exactly(int64_t panel_end, int64_t first, int64_t end, int64_t row, const Vec (&sums)[kBlock],
                     Carry& carry) {
    scale_edges(first, first, end);
    const IntVec incoming = Lane::splat_int(scratch_.references.get()[row]);
    const Scaled<Lane> dead{Lane::splat(0), Lane::splat_int(kDead)};
    IntVec peak = dead.exponent;
    for (int64_t column = first; column < end; ++column) {
      const int lane = static_cast<int>(column - first);
      const Scaled<Lane> before =
          carry.is_exact ? carry.exact[lane] : normalized<Lane>(carry.relative[lane], incoming);
      Scaled<Lane> reach = dead, product = dead;
      Vec kept = dead.mantissa;
      if (column > 0) {
        reach = exact_sum(sum_before(sums[lane], first, end, lane, row), first, column, lane, row);
        const Scaled<Lane> emitted = scaled_exp<Lane>(Lane::load(emission(lane, row)));
        product = normalized<Lane>(reach.mantissa * emitted.mantissa, reach.exponent + emitted.exponent);
        if constexpr (Observer::kKeeps) {
          if (column < shape_.states - 1) kept = emitted.exponent > kDead ? observer_.keep(column, row, reach) : kept;
        }
      }
      if constexpr (Observer::kKeeps) Lane::store(emission(lane, row), kept);
      carry.exact[lane] = product;
      if (column == shape_.states - 1) {
        store(column, row, reach);
        continue;
      }
      Scaled<Lane> alpha{Lane::moved_up(before.mantissa, product.mantissa),
                         Lane::moved_up(before.exponent, product.exponent)};
      if (column == 0 && row == 0) {
        alpha.mantissa[0] = Real{1};
        alpha.exponent[0] = 0;
      }
      store(column, row, alpha);
      peak = larger<Lane>(peak, alpha.exponent);
    }
    carry.is_exact = true;
    raise_references(panel_end, first, end, row, peak);
    store_relative(first, end, row);
  }

  // The sum over all columns before the block at `first` into its column `lane`, which a product gave relative to the
  // references; computed again if terms may have been lost.
  Scaled<Lane> sum_before(Vec value, int64_t first, int64_t end, int lane, int64_t row) {
    const IntVec reference = Lane::load_int(scratch_.references.get() + row);
    const Scaled<Lane> sum = normalized<Lane>(value, reference);
    IntVec may_be_lost = reference > kDead;
    if (!has_steep_) {
      may_be_lost &= value < least_sums(row, F::kLeastSum);
      if (!has_faint_) may_be_lost &= Lane::load_int(scratch_.may_be_faint.get() + row);
    }
    if (!Lane::any(may_be_lost)) return sum;
    const Alive alive = Alive::at(shape_, row, row + kWidth).among(0, first);
    scale_edges(0, first, end);
    const Scaled<Lane> dead{Lane::splat(0), Lane::splat_int(kDead)};
    const Scaled<Lane> exact = exact_sum(dead, alive.first, alive.end, lane, row);
    return {may_be_lost ? exact.mantissa : sum.mantissa, may_be_lost ? exact.exponent : sum.exponent};
  }

  // Bound above which sums over all columns before a block, relative to the references, have lost nothing that matters;
  // not less than 2^least.
  Vec least_sums(int64_t row, int least) const {
    if (!has_faint_) return Lane::splat(power_of_two<ScalarLane<Real>>(least));
    const IntVec peak = Lane::load_int(scratch_.peaks.get() + row) - Lane::load_int(scratch_.references.get() + row);
    return power_of_two<Lane>(larger<Lane>(peak + F::kLeastShare, Lane::splat_int(least)));
  }

  // `start` and the sum over columns [source, source_end) into column `lane` of the block, at any magnitude.
  Scaled<Lane> exact_sum(Scaled<Lane> start, int64_t source, int64_t source_end, int lane, int64_t row) const {
    const Real* mantissas = scratch_.edge_mantissas.get() + lane;
    const Int* exponents = scratch_.edge_exponents.get() + lane;
    IntVec peak = start.exponent;
    for (int64_t k = source; k < source_end; ++k) {
      peak = larger<Lane>(peak, Lane::load_int(columns_.exponents(k, row)) + exponents[k * kBlock]);
    }
    Vec sum = start.mantissa * power_of_two<Lane>(start.exponent - peak);
    for (int64_t k = source; k < source_end; ++k) {
      const Scaled<Lane> term = load(k, row);
      sum += term.mantissa * mantissas[k * kBlock] * power_of_two<Lane>(term.exponent + exponents[k * kBlock] - peak);
    }
    return normalized<Lane>(sum, peak);
  }

  // Records the largest exponents of a block at a vector of slots, and raises references that are far below them.
  bool raise_references(int64_t panel_end, int64_t first, int64_t end, int64_t row, IntVec peak) {
    Int* peaks = scratch_.peaks.get() + row;
    Lane::store_int(peaks, larger<Lane>(Lane::load_int(peaks), peak));
    Int* references = scratch_.references.get() + row;
    const IntVec old = Lane::load_int(references);
    const IntVec is_raised = peak >= old + F::kWide;
    if (!Lane::any(is_raised)) return false;
    const IntVec raised = larger<Lane>(peak, old);
    Lane::store_int(references, raised);
    Int* may_be_faint = scratch_.may_be_faint.get() + row;
    Lane::store_int(may_be_faint, Lane::load_int(may_be_faint) | ((raised > old) & (old > kDead)));
    const Vec factor = power_of_two<Lane>(old - raised);
    const Alive alive = Alive::at(shape_, row, row + kWidth).among(0, first);
    for (int64_t column = alive.first; column < alive.end; ++column) scale(relative(row, column), factor);
    if (first < kPanel) return true;  // there are no sums for later columns yet
    for (int64_t block = end; block < panel_end; block += kBlock) {
      const int64_t block_end = std::min(block + kBlock, panel_end);
      if (!rows_of(block, block_end).has(row)) continue;
      for (int64_t column = block; column < block_end; ++column) scale(relative(row, column), factor);
    }
    return true;
  }
  static void scale(Real* values, Vec factor) { Lane::store(values, Lane::load(values) * factor); }

  // Stores the columns [first, end) at a vector of slots as products need them.
  void store_relative(int64_t first, int64_t end, int64_t row) {
    const IntVec reference = Lane::load_int(scratch_.references.get() + row);
    IntVec is_faint = Lane::load_int(scratch_.may_be_faint.get() + row);
    for (int64_t column = first; column < std::min(end, shape_.states - 1); ++column) {
      const Scaled<Lane> alpha = load(column, row);
      const IntVec exponent = alpha.exponent - reference;
      is_faint |= (alpha.exponent > kDead) & (exponent < -F::kWide);
      Lane::store(relative(row, column), alpha.mantissa * power_of_two<Lane>(exponent));
    }
    Lane::store_int(scratch_.may_be_faint.get() + row, is_faint);
  }

  // Place of the exponentiated edge from column `source` to column `dest`.
  const Real* edge(int64_t source, int64_t dest) const {
    return kByDest ? tile_.at(node_of(dest), node_of(source)) : tile_.at(source, dest);
  }
  // The row of the matrix that holds the edges from (backwards: to) a column.
  const Real* edges_of(int64_t node) const { return sequence_.log_trans + node * sequence_.trans_row_stride; }
  int64_t node_of(int64_t column) const { return kByDest ? shape_.states - 1 - column : column; }

  // Exponentiates the edges from columns [source, source_end) to those of [dest, dest_end) that come after them.
  // They are read row by row, as they lie in memory, and kept so: a row is a source forwards, a destination backwards.
  void exponentiate_edges(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    constexpr int64_t kRowsAhead = 4;  // prefetched: rows are too short for the CPU to foresee
    constexpr int64_t kStride = SweepScratch<Real>::row_stride(kByDest ? kChunk : kPanel);
    const int64_t row = kByDest ? dest : source, row_end = kByDest ? dest_end : source_end;
    const int64_t first = kByDest ? shape_.states - source_end : dest;
    const int64_t end = kByDest ? shape_.states - source : dest_end;
    Vec least = Lane::splat(0), largest = Lane::splat(0), probe = Lane::splat(0);
    for (int64_t column = row; column < row_end; ++column) {
      const int64_t node = node_of(column);
      const Real* ahead = edges_of(node_of(std::min(column + kRowsAhead, shape_.states - 1)));
      Real* edges = scratch_.edges.get() + (column - row) * kStride;
      const int64_t skipped = std::max<int64_t>(node + 1 - first, 0) / kWidth * kWidth;
      for (int64_t u = first + skipped; u < first + round_up(end - first, kBlock); u += kWidth) {
        __builtin_prefetch(ahead + u);
        const Vec log_edge = sequence_.edges(node, u);
        const Vec edge = bounded_exp<Lane>(log_edge);
        Lane::store(edges + u - first, edge);
        largest = log_edge > largest ? log_edge : largest;
        const Vec finite = log_edge < -static_cast<Real>(kLogRange) ? Lane::splat(0) : log_edge;
        least = finite < least ? finite : least;
        probe += edge;
      }
    }
    has_faint_ |= Lane::any(least < F::kLogFaint);
    has_steep_ |= Lane::any(largest > F::kLogSteep);
    is_invalid_ |= Lane::any((largest > static_cast<Real>(kLogRange)) | ~(probe == probe));
    Real largest_log = 0;
    for (int lane = 0; lane < kWidth; ++lane) largest_log = std::max<Real>(largest_log, largest[lane]);
    const int64_t first_place = (kByDest ? node_of(row) * kStride : -row * kStride) - first;
    tile_ = {scratch_.edges.get(), kByDest ? -kStride : kStride, first_place, largest_log};
  }

  // The edges from columns [source, source_end) to those of [dest, dest_end) will be exponentiated next.
  void expect_edges(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    const int64_t row = kByDest ? shape_.states - dest_end : source;
    const int64_t first = kByDest ? shape_.states - source_end : dest;
    next_edges_.plan(edges_of(row) + first, kByDest ? source_end - source : dest_end - dest, sequence_.trans_row_stride,
                     kByDest ? dest_end - dest : source_end - source);
  }
  // The emissions into the columns [first, end) will be read next.
  void expect_emissions(int64_t first, int64_t end) {
    const int64_t node = kByDest ? shape_.states - end : first;
    next_emissions_.plan(sequence_.log_emit + node, end - first, sequence_.emit_row_stride, shape_.targets);
  }

  // The edges from columns `source` and later to the block [first, end) as scaled numbers, for exact sums.
  void scale_edges(int64_t source, int64_t first, int64_t end) {
    const int64_t count = first_scaled_ - source;
    if (count <= 0) return;
    first_scaled_ = source;
    Real* log_edges = scratch_.edge_mantissas.get() + source * kBlock;
    // whole vectors, so that values computed beyond the last source are defined
    const int64_t size = round_up(count * kBlock, kWidth);
    std::fill_n(log_edges, size, -std::numeric_limits<Real>::infinity());
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t u = std::max(source + k + 1, first); u < end; ++u) {
        log_edges[k * kBlock + u - first] = *view_.edge(source + k, u);
      }
    }
    IntVec is_invalid = Lane::splat_int(0);
    for (int64_t i = 0; i < size; i += kWidth) {
      const Vec log_edge = Lane::load(log_edges + i);
      is_invalid |= ~(log_edge <= Lane::splat(kLogRange));
      const Scaled<Lane> edge = scaled_exp<Lane>(log_edge);
      Lane::store(log_edges + i, edge.mantissa);
      Lane::store_int(scratch_.edge_exponents.get() + source * kBlock + i, edge.exponent);
    }
    is_invalid_ |= Lane::any(is_invalid);
  }

  // Place of an emission into a column of the present block.
  Real* emission(int lane, int64_t row) const { return emission_ + lane * shape_.rows(kRowPad) + row; }

  // The node of the first of kWidth columns from `column` on in the order of memory, and which lane a column is there.
  int64_t first_node_of(int64_t column) const { return kByDest ? shape_.states - column - kWidth : column; }
  static int lane_of(int i) { return kByDest ? kWidth - 1 - i : i; }

  // Reads emissions at the steps into the columns [first, end) of a group; -inf where a column has none.
  void read_emissions(int64_t first, int64_t end) {
    constexpr Real kNone = -std::numeric_limits<Real>::infinity();
    const int64_t num_slots = shape_.rows(kRowPad);
    const Rows rows = rows_of(first, end);
    IntVec is_invalid = Lane::splat_int(0);
    for (int64_t column = first; column < end; column += kWidth) {
      for (int64_t row = rows.first; row < rows.end; row += kWidth) {
        Vec square[kWidth];
        for (int i = 0; i < kWidth; ++i) square[i] = emissions_at(row + i, first_node_of(column));
        Lane::transpose(square);
        for (int i = 0; i < kWidth; ++i) {
          const int64_t u = column + i;
          const bool is_inner = u > 0 && u < shape_.states - 1;
          const Steps steps = is_inner && u < end ? Steps::into(shape_, u) : Steps{0, 0};
          const IntVec is_step = (Lane::counted() >= static_cast<Int>(steps.first - row)) &
                                 (Lane::counted() < static_cast<Int>(steps.end - row));
          const Vec log_emission = is_step ? square[lane_of(i)] : Lane::splat(kNone);
          is_invalid |= ~(log_emission <= Lane::splat(kLogRange));
          Lane::store(scratch_.emission.get() + (u - first) * num_slots + row, log_emission);
        }
      }
    }
    is_invalid_ |= Lane::any(is_invalid);
  }
  // Emissions of kWidth nodes from `node` on at one step; anything where there are none.
  Vec emissions_at(int64_t step, int64_t node) const {
    if (step >= shape_.targets) return Lane::splat(0);
    const Real* from = sequence_.log_emit + (kByDest ? shape_.targets - 1 - step : step) * sequence_.emit_row_stride;
    // rows are far apart, so the CPU does not foresee the next group of columns
    __builtin_prefetch(from + node + (kByDest ? -kWidth : 2 * kWidth - 1));
    if (node >= 0 && node + kWidth <= shape_.states) return Lane::load(from + node);
    Vec result = Lane::splat(0);
    for (int64_t i = std::max<int64_t>(-node, 0); i < std::min<int64_t>(shape_.states - node, kWidth); ++i) {
      result[i] = from[node + i];
    }
    return result;
  }

  // Passes on the kept values of the columns [first, end) of a group, step by step.
  void write_kept(int64_t first, int64_t end) {
    const int64_t num_slots = shape_.rows(kRowPad);
    const Rows rows = rows_of(first, end);
    for (int64_t column = first; column < end; column += kWidth) {
      for (int64_t row = rows.first; row < rows.end && row < shape_.targets; row += kWidth) {
        Vec square[kWidth];
        for (int i = 0; i < kWidth; ++i) {
          const int64_t u = column + i, block = u / kBlock * kBlock;
          const bool is_kept = u < end && rows_of(block, std::min(block + kBlock, end)).has(row);
          square[lane_of(i)] =
              is_kept ? Lane::load(scratch_.emission.get() + (u - first) * num_slots + row) : Lane::splat(0);
        }
        Lane::transpose(square);
        for (int i = 0; i < kWidth && row + i < shape_.targets; ++i) {
          observer_.write_kept(first_node_of(column), row + i, square[i]);
        }
      }
    }
  }

  Scaled<Lane> load(int64_t column, int64_t row) const {
    return {Lane::load(columns_.mantissas(column, row)), Lane::load_int(columns_.exponents(column, row))};
  }
  void store(int64_t column, int64_t row, Scaled<Lane> value) const {
    Lane::store(columns_.mantissas(column, row), value.mantissa);
    Lane::store_int(columns_.exponents(column, row), value.exponent);
  }

  const View<Real> view_;
  const Sequence<Real>& sequence_;
  const Shape shape_;
  const Columns<Real> columns_;
  SweepScratch<Real>& scratch_;
  Observer& observer_;
  Real* relative_;  // of column 0 at its first slots
  int64_t relative_stride_;
  Real* emission_ = nullptr;  // of the present block
  EdgeTile<Real> tile_{};  // the edges that are exponentiated
  Prefetch next_edges_;
  Prefetch next_emissions_;
  // Of the edges into the panel: whether a finite one is below 2^-kWide, where its product with a small alpha may
  // underflow, and whether one is above 2^kSteep, which leaves it out of products.
  bool has_faint_ = false;
  bool has_steep_ = false;
  int64_t first_scaled_ = 0;  // first source with scaled edges into the present block
  bool is_invalid_ = false;
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SWEEP_CPU_H_
