// One sweep over one sequence on the host: alpha forwards, or beta (with its own emission) backwards.
#ifndef STATES_ALIGNMENT_SWEEP_CPU_H_
#define STATES_ALIGNMENT_SWEEP_CPU_H_

#include <algorithm>

#include "block_product.h"
#include "sequence_cpu.h"

namespace states_alignment {

constexpr int64_t kPanel = 64;  // columns that are solved block by block, and sources of one product: they stay in L1
constexpr int64_t kPanelDests = 256;  // destinations of a panel whose edges are read at once: these stay in L2

// What a sweep needs beside its columns; `rows` bounds those of every sequence it is used for.
template <class Real>
struct SweepScratch {
  using Int = typename Format<Real>::Int;
  SweepScratch(int64_t rows)
      : sources(kPanel * rows), peaks(rows), faint(rows), has_faint(rows), emission(kBlock * rows),
        edges(std::max(kPanel * row_stride(kPanelDests), kPanelDests * row_stride(kPanel))),
        edge_mantissas(kPanel * kBlock), edge_exponents(kPanel * kBlock) {}
  // Of a row of `count` edges: an odd number of cache lines, so that rows do not compete for the same places in L1.
  static constexpr int64_t row_stride(int64_t count) { return count + 64 / static_cast<int64_t>(sizeof(Real)); }
  Buffer<Real> sources;
  Buffer<Int> peaks;
  Buffer<Int> faint;
  Buffer<bool> has_faint;  // of the vector that starts at a row
  Buffer<Real> emission;
  Buffer<Real> edges;  // by row of the matrix
  Buffer<Real> edge_mantissas;
  Buffer<Int> edge_exponents;
};

template <class RealType, Direction kDirection>
class Sweep {
 public:
  using Real = RealType;
  using Lane = SimdLane<Real>;
  using F = Format<Real>;
  using Int = typename F::Int;
  using Vec = typename Lane::Real;
  using IntVec = typename Lane::Int;
  static constexpr int kWidth = Lane::kWidth;
  static constexpr bool kByDest = kDirection == Direction::kBackward;

  Sweep(const Sequence<Real>& sequence, const Columns<Real>& columns, SweepScratch<Real>& scratch)
      : view_(sequence.view(kDirection)), sequence_(sequence), shape_(sequence.shape), columns_(columns),
        scratch_(scratch) {}

  // Fills all columns. The end column holds the likelihood at slot T; in every other column, slot t holds
  // the probability of the paths to (from) this node that have emitted t targets, its own included.
  // `reached(column, row, sums)` is called with the sums at the vector of steps from `row` on, before the column's own
  // emission, for all steps into the column; other lanes mean nothing.
  template <class Reached>
  void run(Reached&& reached) {
    std::fill_n(columns_.mantissa, shape_.states * columns_.rows, Real{0});
    std::fill_n(columns_.exponent, shape_.states * columns_.rows, Int{kDead});
    columns_.mantissas(0)[0] = Real{1};
    columns_.exponents(0)[0] = 0;
    const int64_t num_panels = round_up(shape_.states, kPanel) / kPanel;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      solve_panel(panel * kPanel, std::min(panel * kPanel + kPanel, shape_.states), reached);
      const Handover handover = Handover::after(panel, num_panels);
      const int64_t end = std::min(handover.dest_end * kPanel, shape_.states);
      for (int64_t dest = handover.dest * kPanel; dest < end; dest += kPanelDests) {
        for (int64_t source = handover.source * kPanel; source < handover.dest * kPanel; source += kPanel) {
          pass_on_panel(source, dest, std::min(dest + kPanelDests, end));
        }
      }
    }
  }

  // Whether a NaN or a value that is no log probability was read.
  bool is_invalid() const { return is_invalid_; }

 private:
  // Completes columns [first, end), which hold the sums over all columns before `first`, block by block.
  template <class Reached>
  void solve_panel(int64_t first, int64_t end, Reached& reached) {
    exponentiate_edges(first, end, first, end);
    const int64_t num_blocks = round_up(end - first, kBlock) / kBlock;
    for (int64_t block = 0; block < num_blocks; ++block) {
      solve(first + block * kBlock, std::min(first + block * kBlock + kBlock, end), reached);
      const Handover handover = Handover::after(block, num_blocks);
      if (handover.dest == num_blocks) return;
      pass_on(first + handover.source * kBlock, first + handover.dest * kBlock, first + handover.dest * kBlock,
              std::min(first + handover.dest_end * kBlock, end));
    }
  }

  // Adds the sums over the panel at `source` to columns [dest, dest_end).
  void pass_on_panel(int64_t source, int64_t dest, int64_t dest_end) {
    if (Steps::between(shape_, source, source + kPanel, dest, dest_end).empty()) return;
    exponentiate_edges(source, source + kPanel, dest, dest_end);
    pass_on(source, source + kPanel, dest, dest_end);
  }

  // Completes the block [first, end), which holds the sums over all columns before `first`.
  template <class Reached>
  void solve(int64_t first, int64_t end, Reached& reached) {
    scale_edges(first, end - first, first);
    read_emissions(first, end);
    // all slots of the block that may hold sums: none of them stays where a column emits nothing
    const Steps steps{Steps::into(shape_, first).first, Steps::into(shape_, end - 1).end};
    for (int64_t column = std::max<int64_t>(first, 1); column < end; ++column) {
      const int lane = static_cast<int>(column - first);
      const Real* log_emission = scratch_.emission.get() + lane * columns_.rows;
      Scaled<Lane> before{Lane::splat(0), Lane::splat_int(kDead)};
      // the vector after the last step takes what moves up into it
      for (int64_t row = steps.first / kWidth * kWidth; row <= steps.end && row < columns_.rows; row += kWidth) {
        const Scaled<Lane> reach = exact_sum(load(column, row), first, lane, lane, row);
        if (column == shape_.states - 1) {
          store(column, row, reach);
          continue;
        }
        reached(column, row, reach);
        // slot t + 1 becomes the sum at step t times the emission there; all other slots are dead
        const Scaled<Lane> emission = scaled_exp<Lane>(Lane::load(log_emission + row));
        const Scaled<Lane> product =
            normalized<Lane>(reach.mantissa * emission.mantissa, reach.exponent + emission.exponent);
        store(column, row,
              {Lane::moved_up(before.mantissa, product.mantissa), Lane::moved_up(before.exponent, product.exponent)});
        before = product;
      }
    }
  }

  // Adds the sums over columns [source, source_end) to columns [dest, dest_end), with the edges that are exponentiated.
  void pass_on(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    const Steps all = Steps::between(shape_, source, source_end, dest, dest_end);
    if (all.empty()) return;
    const int64_t num_sources = source_end - source;
    pack_sources(source, num_sources, all);
    for (int64_t first = dest; first < dest_end; first += kBlock) {
      const int64_t end = std::min(first + kBlock, dest_end);
      const Steps steps = Steps::between(shape_, source, source_end, first, end);
      if (steps.empty()) continue;
      has_scaled_edges_ = false;
      int64_t row = steps.first / kWidth * kWidth;
      for (; row + kProductVectors * kWidth < steps.end + kWidth; row += kProductVectors * kWidth) {
        multiply<kProductVectors>(source, num_sources, first, end, row);
      }
      for (; row < steps.end; row += kWidth) multiply<1>(source, num_sources, first, end, row);
    }
  }

  template <int kVectors>
  void multiply(int64_t source, int64_t num_sources, int64_t dest, int64_t dest_end, int64_t row) {
    Vec sums[kVectors][kBlock];
    block_product<Lane, kVectors>(scratch_.sources.get() + row * kPanel, kPanel * kWidth, edge(source, dest),
                                  edge_strides_, num_sources, sums);
    for (int vector = 0; vector < kVectors; ++vector, row += kWidth) {
      const IntVec peak = Lane::load_int(scratch_.peaks.get() + row);
      const bool may_be_lost = has_faint_ || has_steep_ || scratch_.has_faint.get()[row];
      for (int64_t column = dest; column < dest_end; ++column) {
        const int lane = static_cast<int>(column - dest);
        Scaled<Lane> sum = normalized<Lane>(sums[vector][lane], peak);
        if (may_be_lost) {
          IntVec is_lost = (peak > kDead) & (sums[vector][lane] < power_of_two<ScalarLane<Real>>(F::kLeastSum));
          if (!has_faint_) is_lost &= Lane::load_int(scratch_.faint.get() + row);
          if (has_steep_) is_lost = peak > kDead;
          if (Lane::any(is_lost)) {
            if (!has_scaled_edges_) scale_edges(source, num_sources, dest);
            const Scaled<Lane> dead{Lane::splat(0), Lane::splat_int(kDead)};
            const Scaled<Lane> exact = exact_sum(dead, source, num_sources, lane, row);
            sum = {is_lost ? exact.mantissa : sum.mantissa, is_lost ? exact.exponent : sum.exponent};
          }
        }
        store(column, row, plus(load(column, row), sum));
      }
    }
  }

  // `start` and the sum over columns source .. source + count - 1, the first of a tile, into its column `lane`, at any
  // magnitude.
  Scaled<Lane> exact_sum(Scaled<Lane> start, int64_t source, int64_t count, int lane, int64_t row) const {
    const Real* mantissas = scratch_.edge_mantissas.get();
    const Int* exponents = scratch_.edge_exponents.get();
    IntVec peak = start.exponent;
    for (int64_t k = 0; k < count; ++k) {
      const IntVec exponent = Lane::load_int(columns_.exponents(source + k) + row) + exponents[k * kBlock + lane];
      peak = larger<Lane>(peak, exponent);
    }
    Vec sum = start.mantissa * power_of_two<Lane>(start.exponent - peak);
    for (int64_t k = 0; k < count; ++k) {
      const Scaled<Lane> term = load(source + k, row);
      const int64_t edge = k * kBlock + lane;
      sum += term.mantissa * mantissas[edge] * power_of_two<Lane>(term.exponent + exponents[edge] - peak);
    }
    return normalized<Lane>(sum, peak);
  }

  // sources[row / kWidth][k][lane]: alpha of the sources in the order of the tile, each row relative to its peak.
  void pack_sources(int64_t source, int64_t num_sources, Steps steps) {
    for (int64_t row = steps.first / kWidth * kWidth; row < steps.end; row += kWidth) {
      IntVec peak = Lane::splat_int(kDead);
      for (int64_t k = 0; k < num_sources; ++k) {
        peak = larger<Lane>(peak, Lane::load_int(columns_.exponents(source + k) + row));
      }
      IntVec is_faint = Lane::splat_int(0);
      Real* packed = scratch_.sources.get() + row * kPanel;
      for (int64_t k = 0; k < num_sources; ++k) {
        const Scaled<Lane> alpha = load(source + k, row);
        const IntVec exponent = alpha.exponent - peak;
        is_faint |= (alpha.exponent > kDead) & (exponent < -F::kWide);
        Lane::store(packed + k * kWidth, alpha.mantissa * power_of_two<Lane>(exponent));
      }
      Lane::store_int(scratch_.peaks.get() + row, peak);
      Lane::store_int(scratch_.faint.get() + row, is_faint);
      scratch_.has_faint.get()[row] = Lane::any(is_faint);
    }
  }

  // Where the exponentiated edge from column `source` to column `dest` is.
  const Real* edge(int64_t source, int64_t dest) const {
    return scratch_.edges.get() + (first_edge_ + source * edge_strides_.by_term + dest * edge_strides_.by_column);
  }
  // The row of the matrix that holds the edges from (backwards: to) a column.
  const Real* edges_of(int64_t node) const { return sequence_.log_trans + node * sequence_.trans_row_stride; }
  int64_t node_of(int64_t column) const { return kByDest ? shape_.states - 1 - column : column; }

  // Exponentiates the edges from columns [source, source_end) to the blocks of [dest, dest_end) that come after them.
  // They are read row by row, as they lie in memory, and kept so: a row is a source forwards, a destination backwards.
  void exponentiate_edges(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    constexpr Real kNoEdge = -std::numeric_limits<Real>::infinity();
    constexpr int64_t kRowsAhead = 4;  // asked for before they are needed: rows are too short for the CPU to foresee
    constexpr int64_t kStride = SweepScratch<Real>::row_stride(kByDest ? kPanel : kPanelDests);
    const int64_t row = kByDest ? dest : source, row_end = kByDest ? dest_end : source_end;
    const int64_t first = kByDest ? shape_.states - source_end : dest;
    const int64_t end = kByDest ? shape_.states - source : dest_end;
    edge_strides_ = kByDest ? ScalarStrides{-1, kStride} : ScalarStrides{kStride, 1};
    first_edge_ = kByDest ? source_end - 1 - dest * kStride : -source * kStride - dest;
    IntVec has_faint = Lane::splat_int(0), has_steep = Lane::splat_int(0), is_invalid = Lane::splat_int(0);
    for (int64_t column = row; column < row_end; ++column) {
      const int64_t node = node_of(column);
      const Real* log_edges = edges_of(node);
      const Real* ahead = edges_of(node_of(std::min(column + kRowsAhead, shape_.states - 1)));
      Real* edges = scratch_.edges.get() + (column - row) * kStride - first;
      const int64_t outside_block = node_of(kByDest ? column / kBlock * kBlock - 1 : (column / kBlock + 1) * kBlock);
      const int64_t skipped = std::max<int64_t>(outside_block - first, 0) / kWidth * kWidth;
      for (int64_t u = first + skipped; u < first + round_up(end - first, kBlock); u += kWidth) {
        __builtin_prefetch(ahead + u);
        const int64_t left = shape_.states - u;
        Vec log_edge = left >= kWidth ? Lane::load(log_edges + u)
                                      : Lane::load(log_edges + u, std::max<int64_t>(left, 0), kNoEdge);
        // what lies at and below the diagonal may be anything
        if (u <= node) log_edge = Lane::counted() > static_cast<Int>(node - u) ? log_edge : Lane::splat(kNoEdge);
        is_invalid |= ~(log_edge <= Lane::splat(kLogRange));
        const Scaled<Lane> edge = scaled_exp<Lane>(log_edge);
        const IntVec is_steep = edge.exponent > F::kWide;
        has_steep |= is_steep;
        has_faint |= (edge.exponent > kDead) & (edge.exponent < -F::kWide);
        const IntVec exponent = is_steep ? Lane::splat_int(kDead) : edge.exponent;
        Lane::store(edges + u, edge.mantissa * power_of_two<Lane>(exponent));
      }
    }
    is_invalid_ |= Lane::any(is_invalid);
    has_faint_ = Lane::any(has_faint);
    has_steep_ = Lane::any(has_steep);
  }

  // The tile of edges from `count` columns to the block at `dest` as scaled numbers, for exact sums.
  void scale_edges(int64_t source, int64_t count, int64_t dest) {
    Real* log_edges = scratch_.edge_mantissas.get();
    // whole vectors, so that what is computed beyond the last source is defined
    const int64_t size = round_up(count * kBlock, kWidth);
    std::fill_n(log_edges, size, -std::numeric_limits<Real>::infinity());
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t u = std::max(source + k + 1, dest); u < std::min(dest + kBlock, shape_.states); ++u) {
        log_edges[k * kBlock + u - dest] = *view_.edge(source + k, u);
      }
    }
    IntVec is_invalid = Lane::splat_int(0);
    for (int64_t i = 0; i < size; i += kWidth) {
      const Vec log_edge = Lane::load(log_edges + i);
      is_invalid |= ~(log_edge <= Lane::splat(kLogRange));
      const Scaled<Lane> edge = scaled_exp<Lane>(log_edge);
      Lane::store(scratch_.edge_mantissas.get() + i, edge.mantissa);
      Lane::store_int(scratch_.edge_exponents.get() + i, edge.exponent);
    }
    is_invalid_ |= Lane::any(is_invalid);
    has_scaled_edges_ = true;
  }

  // emission[lane][step] at the steps into each column; -inf at the ends of the DAG, which emit nothing.
  void read_emissions(int64_t first, int64_t end) {
    constexpr int kColumnStride = kByDest ? -1 : 1;
    const int64_t rows = columns_.rows;
    const int64_t first_read = std::max<int64_t>(first, 1), end_read = std::min(end, shape_.states - 1);
    const Steps all{Steps::into(shape_, first_read).first, Steps::into(shape_, end_read - 1).end};
    Real* emissions = scratch_.emission.get();
    std::fill_n(emissions, kBlock * rows, -std::numeric_limits<Real>::infinity());
    for (int64_t step = all.first; step < all.end; ++step) {
      const Real* from = view_.emission(first, step);
      __builtin_prefetch(from + 2 * kBlock * kColumnStride);  // a block ahead the line is mostly here already
      if (end_read - first_read == kBlock) {  // a count that the compiler knows
        for (int lane = 0; lane < kBlock; ++lane) emissions[lane * rows + step] = from[lane * kColumnStride];
      } else {
        for (int64_t lane = first_read - first; lane < end_read - first; ++lane) {
          emissions[lane * rows + step] = from[lane * kColumnStride];
        }
      }
    }
    IntVec is_invalid = Lane::splat_int(0);
    for (int64_t column = first; column < end; ++column) {
      const bool is_end = column == 0 || column == shape_.states - 1;
      const Steps steps = is_end ? Steps{0, 0} : Steps::into(shape_, column);
      Real* emission = emissions + (column - first) * rows;
      std::fill(emission, emission + steps.first, -std::numeric_limits<Real>::infinity());
      std::fill(emission + steps.end, emission + rows, -std::numeric_limits<Real>::infinity());
      for (int64_t row = steps.first / kWidth * kWidth; row < steps.end; row += kWidth) {
        is_invalid |= ~(Lane::load(emission + row) <= Lane::splat(kLogRange));
      }
    }
    is_invalid_ |= Lane::any(is_invalid);
  }

  Scaled<Lane> load(int64_t column, int64_t row) const {
    return {Lane::load(columns_.mantissas(column) + row), Lane::load_int(columns_.exponents(column) + row)};
  }
  void store(int64_t column, int64_t row, Scaled<Lane> value) const {
    Lane::store(columns_.mantissas(column) + row, value.mantissa);
    Lane::store_int(columns_.exponents(column) + row, value.exponent);
  }

  const View<Real> view_;
  const Sequence<Real>& sequence_;
  const Shape shape_;
  const Columns<Real> columns_;
  SweepScratch<Real>& scratch_;
  ScalarStrides edge_strides_{};
  int64_t first_edge_ = 0;  // place of the edge from column 0 to column 0
  // Of the exponentiated edges: whether a finite one is below 2^-kWide, where its product with a small alpha may
  // underflow, and whether one is above 2^kWide, which leaves it out of products.
  bool has_faint_ = false;
  bool has_steep_ = false;
  bool has_scaled_edges_ = false;  // from the sources to the block of the present product
  bool is_invalid_ = false;
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SWEEP_CPU_H_
