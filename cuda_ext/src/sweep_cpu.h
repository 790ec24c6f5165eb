// One sweep over one sequence on the host: alpha forwards, or beta (with its own emission) backwards.
#ifndef STATES_ALIGNMENT_SWEEP_CPU_H_
#define STATES_ALIGNMENT_SWEEP_CPU_H_

#include <algorithm>

#include "block_product.h"
#include "sequence_cpu.h"

namespace states_alignment {

// What a sweep needs beside its columns; `rows` and `states` bound every sequence it is used for.
template <class Real>
struct SweepScratch {
  using Int = typename Format<Real>::Int;
  SweepScratch(int64_t rows)
      : sources(kChunk * rows), peaks(rows), faint(rows), has_faint(rows), emission(kBlock * rows),
        log_edges(kChunk * kBlock), edges(kChunk * kBlock), edge_mantissas(kChunk * kBlock),
        edge_exponents(kChunk * kBlock) {}
  Buffer<Real> sources;
  Buffer<Int> peaks;
  Buffer<Int> faint;
  Buffer<bool> has_faint;  // of the vector that starts at a row
  Buffer<Real> emission;
  Buffer<Real> log_edges;
  Buffer<Real> edges;
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
      : view_(sequence.view(kDirection)), shape_(sequence.shape), columns_(columns), scratch_(scratch) {}

  // Fills all columns. The end column holds the likelihood at slot T; in every other column, slot t holds
  // the probability of the paths to (from) this node that have emitted t targets, its own included.
  // `reached(column, steps)` is called when slots t of a column hold the sums before its own emission.
  template <class Reached>
  void run(Reached&& reached) {
    std::fill_n(columns_.mantissa, shape_.states * columns_.rows, Real{0});
    std::fill_n(columns_.exponent, shape_.states * columns_.rows, Int{kDead});
    columns_.mantissas(0)[0] = Real{1};
    columns_.exponents(0)[0] = 0;
    const int64_t num_blocks = round_up(shape_.states, kBlock) / kBlock;
    for (int64_t block = 0; block < num_blocks; ++block) {
      solve(block * kBlock, std::min(block * kBlock + kBlock, shape_.states), reached);
      const Handover handover = Handover::after(block, num_blocks);
      for (int64_t source = handover.source * kBlock; source < handover.dest * kBlock; source += kChunk) {
        pass_on(source, std::min(source + kChunk, handover.dest * kBlock), handover.dest * kBlock,
                std::min(handover.dest_end * kBlock, shape_.states));
      }
    }
  }

  // Whether a NaN or a value that is no log probability was read.
  bool is_invalid() const { return is_invalid_; }

 private:
  // Completes columns [first, end), which hold the sums over all columns before `first`.
  template <class Reached>
  void solve(int64_t first, int64_t end, Reached& reached) {
    read_edges(first, end, first);
    scale_edges(end - first);
    read_emissions(first, end);
    for (int64_t column = std::max<int64_t>(first, 1); column < end; ++column) {
      const Steps steps = Steps::into(shape_, column);
      const int lane = static_cast<int>(column - first);
      for (int64_t row = steps.first / kWidth * kWidth; row < steps.end; row += kWidth) {
        const Scaled<Lane> sum = plus(load(column, row), exact_sum(first, lane, lane, row));
        store(column, row, normalized<Lane>(sum.mantissa, sum.exponent));
      }
      if (column == shape_.states - 1) return;
      reached(column, steps);
      emit(column, steps, scratch_.emission.get() + lane * columns_.rows);
    }
  }

  // Slot t + 1 becomes the sum at step t times the emission there; all other slots are dead.
  void emit(int64_t column, Steps steps, const Real* log_emission) {
    const Scaled<Lane> dead{Lane::splat(0), Lane::splat_int(kDead)};
    Scaled<Lane> before = dead;
    for (int64_t row = 0; row < columns_.rows; row += kWidth) {
      Scaled<Lane> product = dead;
      if (row + kWidth > steps.first && row < steps.end) {
        const Scaled<Lane> reach = load(column, row);
        const Scaled<Lane> emission = scaled_exp<Lane>(Lane::load(log_emission + row));
        product = normalized<Lane>(reach.mantissa * emission.mantissa, reach.exponent + emission.exponent);
      }
      store(column, row,
            {Lane::moved_up(before.mantissa, product.mantissa), Lane::moved_up(before.exponent, product.exponent)});
      before = product;
    }
  }

  // Adds the sums over columns [source, source_end) to columns [dest, dest_end).
  void pass_on(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    const Steps all = Steps::between(shape_, source, source_end, dest, dest_end);
    if (all.empty()) return;
    const int64_t num_sources = source_end - source;
    pack_sources(source, num_sources, all);
    for (int64_t first = dest; first < dest_end; first += kBlock) {
      const int64_t end = std::min(first + kBlock, dest_end);
      const Steps steps = Steps::between(shape_, source, source_end, first, end);
      if (steps.empty()) continue;
      read_edges(source, source_end, first);
      const EdgeRange range = exponentiate_edges(num_sources);
      int64_t row = steps.first / kWidth * kWidth;
      for (; row + kProductVectors * kWidth < steps.end + kWidth; row += kProductVectors * kWidth) {
        multiply<kProductVectors>(source, num_sources, first, end, row, range);
      }
      for (; row < steps.end; row += kWidth) multiply<1>(source, num_sources, first, end, row, range);
    }
  }

  struct EdgeRange {
    bool has_faint;  // a finite edge below 2^-kWide: its product with a small alpha may underflow
    bool has_steep;  // an edge above 2^kWide: left out of the product
  };

  template <int kVectors>
  void multiply(int64_t source, int64_t num_sources, int64_t dest, int64_t dest_end, int64_t row, EdgeRange range) {
    Vec sums[kVectors][kBlock];
    const ScalarStrides strides = kByDest ? ScalarStrides{1, num_sources} : ScalarStrides{kBlock, 1};
    block_product<Lane, kVectors>(scratch_.sources.get() + row * kChunk, kChunk * kWidth, scratch_.edges.get(), strides,
                                  num_sources, sums);
    for (int vector = 0; vector < kVectors; ++vector, row += kWidth) {
      const IntVec peak = Lane::load_int(scratch_.peaks.get() + row);
      const bool may_be_lost = range.has_faint || range.has_steep || scratch_.has_faint.get()[row];
      for (int64_t column = dest; column < dest_end; ++column) {
        const int lane = static_cast<int>(column - dest);
        Scaled<Lane> sum = normalized<Lane>(sums[vector][lane], peak);
        if (may_be_lost) {
          IntVec is_lost = (peak > kDead) & (sums[vector][lane] < power_of_two<ScalarLane<Real>>(F::kLeastSum));
          if (!range.has_faint) is_lost &= Lane::load_int(scratch_.faint.get() + row);
          if (range.has_steep) is_lost = peak > kDead;
          if (Lane::any(is_lost)) {
            if (!has_scaled_edges_) scale_edges(num_sources);
            const Scaled<Lane> exact = exact_sum(source, num_sources, lane, row);
            sum = {is_lost ? exact.mantissa : sum.mantissa, is_lost ? exact.exponent : sum.exponent};
          }
        }
        store(column, row, plus(load(column, row), sum));
      }
    }
  }

  // Sum over columns source .. source + count - 1, the first of a tile, into its column `lane`, at any magnitude.
  Scaled<Lane> exact_sum(int64_t source, int64_t count, int lane, int64_t row) const {
    const Real* mantissas = scratch_.edge_mantissas.get();
    const Int* exponents = scratch_.edge_exponents.get();
    IntVec peak = Lane::splat_int(kDead);
    for (int64_t k = 0; k < count; ++k) {
      const IntVec exponent = Lane::load_int(columns_.exponents(source + k) + row) + exponents[in_tile(k, lane)];
      peak = larger<Lane>(peak, exponent);
    }
    Vec sum = Lane::splat(0);
    for (int64_t k = 0; k < count; ++k) {
      const Scaled<Lane> term = load(source + k, row);
      const int64_t edge = in_tile(k, lane);
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
      Real* packed = scratch_.sources.get() + row * kChunk;
      for (int64_t k = 0; k < num_sources; ++k) {
        const Scaled<Lane> alpha = load(source + k, row);
        const IntVec exponent = alpha.exponent - peak;
        is_faint |= (alpha.exponent > kDead) & (exponent < -F::kWide);
        const int64_t place = kByDest ? num_sources - 1 - k : k;
        Lane::store(packed + place * kWidth, alpha.mantissa * power_of_two<Lane>(exponent));
      }
      Lane::store_int(scratch_.peaks.get() + row, peak);
      Lane::store_int(scratch_.faint.get() + row, is_faint);
      scratch_.has_faint.get()[row] = Lane::any(is_faint);
    }
  }

  // Where a tile of edges keeps that from source + k to dest + lane. The order is that of memory, in which what is read
  // forwards lies by source, and what is read backwards by destination with the last source first.
  int64_t in_tile(int64_t k, int lane) const {
    return kByDest ? lane * tile_sources_ + (tile_sources_ - 1 - k) : k * kBlock + lane;
  }

  // Reads the tile of edges from [source, source_end) to the block at `dest`; -inf where there is none.
  void read_edges(int64_t source, int64_t source_end, int64_t dest) {
    const int64_t num_sources = source_end - source;
    Real* log_edges = scratch_.log_edges.get();
    tile_sources_ = num_sources;
    has_scaled_edges_ = false;
    if (source_end <= dest && dest + kBlock <= shape_.states) {
      if (kByDest) {
        for (int lane = 0; lane < kBlock; ++lane) {
          std::copy_n(view_.edge(source_end - 1, dest + lane), num_sources, log_edges + lane * num_sources);
        }
      } else {
        for (int64_t k = 0; k < num_sources; ++k) {
          std::copy_n(view_.edge(source + k, dest), kBlock, log_edges + k * kBlock);
        }
      }
      return;
    }
    // whole vectors, so that what is computed beyond the last source is defined
    std::fill_n(log_edges, round_up(num_sources * kBlock, kWidth), -std::numeric_limits<Real>::infinity());
    for (int64_t k = 0; k < num_sources; ++k) {
      for (int64_t u = std::max(source + k + 1, dest); u < std::min(dest + kBlock, shape_.states); ++u) {
        log_edges[in_tile(k, static_cast<int>(u - dest))] = *view_.edge(source + k, u);
      }
    }
  }

  EdgeRange exponentiate_edges(int64_t num_sources) {
    IntVec has_faint = Lane::splat_int(0), has_steep = Lane::splat_int(0), is_invalid = Lane::splat_int(0);
    for (int64_t i = 0; i < num_sources * kBlock; i += kWidth) {
      const Vec log_edge = Lane::load(scratch_.log_edges.get() + i);
      is_invalid |= ~(log_edge <= Lane::splat(kLogRange));
      const Scaled<Lane> edge = scaled_exp<Lane>(log_edge);
      const IntVec is_steep = edge.exponent > F::kWide;
      has_steep |= is_steep;
      has_faint |= (edge.exponent > kDead) & (edge.exponent < -F::kWide);
      const IntVec exponent = is_steep ? Lane::splat_int(kDead) : edge.exponent;
      Lane::store(scratch_.edges.get() + i, edge.mantissa * power_of_two<Lane>(exponent));
    }
    is_invalid_ |= Lane::any(is_invalid);
    return {Lane::any(has_faint), Lane::any(has_steep)};
  }

  // Edges of the block as scaled numbers, for exact sums.
  void scale_edges(int64_t num_sources) {
    IntVec is_invalid = Lane::splat_int(0);
    for (int64_t i = 0; i < num_sources * kBlock; i += kWidth) {
      const Vec log_edge = Lane::load(scratch_.log_edges.get() + i);
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
  const Shape shape_;
  const Columns<Real> columns_;
  SweepScratch<Real>& scratch_;
  int64_t tile_sources_ = 0;
  bool has_scaled_edges_ = false;
  bool is_invalid_ = false;
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SWEEP_CPU_H_
