// The transition gradient of one sequence on the host: minus the posterior of every edge,
//
//     E[v, u] / likelihood * sum over t of alpha[v, t] * beta[u, T - t]        (beta with u's own emission)
//
// a (nodes x slots) times (slots x nodes) product, by panels of sources: their rows of the gradient lie behind each
// other in memory and are all that is written until the panel is done.
#ifndef STATES_ALIGNMENT_GRADIENT_CPU_H_
#define STATES_ALIGNMENT_GRADIENT_CPU_H_

#include <algorithm>

#include "block_product.h"
#include "sequence_cpu.h"

namespace states_alignment {

constexpr int64_t kPanelSources = 64;
constexpr int64_t kTileDests = 64;

template <class Real>
struct GradientScratch {
  using Int = typename Format<Real>::Int;
  GradientScratch(int64_t rows)
      : sources(kPanelSources * rows), source_peaks(rows), dests(kTileDests * rows), dest_peaks(rows), shifts(rows),
        exact_steps(rows) {}
  Buffer<Real> sources;
  Buffer<Int> source_peaks;
  Buffer<Real> dests;
  Buffer<Int> dest_peaks;
  Buffer<Int> shifts;
  Buffer<int64_t> exact_steps;
};

template <class RealType>
class EdgeGradient {
 public:
  using Real = RealType;
  using Lane = SimdLane<Real>;
  using Exact = ScalarLane<Real>;
  using F = Format<Real>;
  using Int = typename F::Int;
  using Vec = typename Lane::Real;
  using IntVec = typename Lane::Int;
  static constexpr int kWidth = Lane::kWidth;

  // `alpha` by node, `beta` by node counted from the end, as the two sweeps leave them.
  EdgeGradient(const Sequence<Real>& sequence, const Columns<Real>& alpha, const Columns<Real>& beta,
               GradientScratch<Real>& scratch)
      : sequence_(sequence), shape_(sequence.shape), alpha_(alpha), beta_(beta), scratch_(scratch) {}

  // Writes all of gradient (stride x stride); zeros where there is no edge.
  void write(Scaled<Exact> likelihood, Real grad_nll, Real* gradient, int64_t stride) {
    scale_ = -grad_nll / likelihood.mantissa;
    likelihood_exponent_ = likelihood.exponent;
    const int64_t num_sources = shape_.states - 1;
    for (int64_t source = 0; source < num_sources; source += kPanelSources) {
      const int64_t source_end = std::min(source + kPanelSources, num_sources);
      // in the order of memory, which brings the panel into the cache faster than its tiles would
      std::fill_n(gradient + source * stride, (source_end - source) * stride, Real{0});
      find_edge_shift(source, source_end);
      pack_sources(source, source_end);
      for (int64_t dest = source; dest < shape_.states; dest += kTileDests) {
        tile(source, source_end, dest, std::min(dest + kTileDests, shape_.states), gradient, stride);
      }
    }
    std::fill_n(gradient + num_sources * stride, (stride - num_sources) * stride, Real{0});
  }

 private:
  // Smallest probability, as a power of two, that is still added to a posterior.
  static constexpr int kLeastPosterior = -F::kWide;

  void tile(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end, Real* gradient, int64_t stride) {
    const Steps steps = live_steps(source, source_end, dest, dest_end);
    if (!steps.empty()) {
      pack_dests(dest, dest_end, steps);
      for (int64_t first = source; first < source_end; first += kBlock) {
        const Real* packed_sources = scratch_.sources.get() + (first - source) * alpha_.rows + steps.first;
        for (int64_t u = dest; u < dest_end; u += kProductVectors * kWidth) {
          Vec sums[kProductVectors][kBlock];
          const Real* packed_dests = scratch_.dests.get() + (u - dest) * beta_.rows + steps.first * kWidth;
          block_product<Lane, kProductVectors>(packed_dests, beta_.rows * kWidth, packed_sources,
                                               ScalarStrides{1, alpha_.rows}, steps.end - steps.first, sums);
          for (int64_t v = first; v < std::min(first + kBlock, source_end); ++v) {
            for (int vector = 0; vector < kProductVectors; ++vector) {
              put(sums[vector][v - first], v, u + vector * kWidth, gradient + v * stride);
            }
          }
        }
      }
    }
    for (int64_t i = 0; i < num_exact_; ++i) {
      add_exact(scratch_.exact_steps.get()[i], source, source_end, dest, dest_end, gradient, stride);
    }
  }

  // The shift that brings the largest edge of the panel below 1.
  void find_edge_shift(int64_t source, int64_t source_end) {
    Vec largest = Lane::splat(0);
    Real largest_of_rest = 0;
    for (int64_t v = source; v < source_end; ++v) {
      const Real* row = sequence_.log_trans + v * sequence_.trans_row_stride;
      int64_t u = v + 1;
      for (; u + kWidth <= shape_.states; u += kWidth) {
        const Vec log_edge = Lane::load(row + u);
        largest = log_edge > largest ? log_edge : largest;
      }
      for (; u < shape_.states; ++u) largest_of_rest = std::max(largest_of_rest, row[u]);
    }
    for (int lane = 0; lane < kWidth; ++lane) largest_of_rest = std::max<Real>(largest_of_rest, largest[lane]);
    edge_shift_ = largest_of_rest > 0 ? std::max<Int>(scaled_exp<Exact>(largest_of_rest).exponent + 1, 0) : 0;
  }

  // sources[v][t]: alpha of the panel, each step relative to its peak.
  void pack_sources(int64_t source, int64_t source_end) {
    for (int64_t row = 0; row < alpha_.rows; row += kWidth) {
      IntVec peak = Lane::splat_int(kDead);
      for (int64_t v = source; v < source_end; ++v) {
        peak = larger<Lane>(peak, Lane::load_int(alpha_.exponents(v) + row));
      }
      Lane::store_int(scratch_.source_peaks.get() + row, peak);
      for (int64_t v = source; v < round_up(source_end - source, kBlock) + source; ++v) {
        Vec scaled = Lane::splat(0);
        if (v < source_end) {
          scaled = Lane::load(alpha_.mantissas(v) + row) *
                   power_of_two<Lane>(Lane::load_int(alpha_.exponents(v) + row) - peak);
        }
        Lane::store(scratch_.sources.get() + (v - source) * alpha_.rows + row, scaled);
      }
    }
  }

  // The steps at which some edge of the tile matters; those whose bound is no bound go to exact_steps.
  //
  // A posterior is at most 1, so alpha * beta / likelihood can only be large where the edge between the two peaks is
  // faint or, near the diagonal, does not exist. There the peaks hide the edges that do count.
  Steps live_steps(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    const int64_t T = shape_.targets;
    Int* peaks = scratch_.dest_peaks.get();  // by slot of beta, which is T - t
    for (int64_t row = 0; row < beta_.rows; row += kWidth) {
      IntVec peak = Lane::splat_int(kDead);
      for (int64_t u = std::max<int64_t>(dest, 1); u < dest_end; ++u) {
        peak = larger<Lane>(peak, Lane::load_int(beta_.exponents(shape_.states - 1 - u) + row));
      }
      Lane::store_int(peaks + row, peak);
    }
    const Steps possible = Steps::between(shape_, source, source_end, std::max<int64_t>(dest, 1), dest_end);
    Steps live{std::max(possible.first, possible.end), possible.first};
    num_exact_ = 0;
    for (int64_t t = possible.first; t < possible.end; ++t) {
      const Int shift = scratch_.source_peaks.get()[t] + edge_shift_ - likelihood_exponent_;
      const Int bound = shift + peaks[T - t];
      scratch_.shifts.get()[T - t] = shift;
      if (bound < kLeastPosterior) continue;
      if (bound > F::kWide) {
        // left out of the product: its factors may have any exponent
        scratch_.shifts.get()[T - t] = kDead;
        scratch_.exact_steps.get()[num_exact_++] = t;
        continue;
      }
      live.first = std::min(live.first, t);
      live.end = std::max(live.end, t + 1);
    }
    return live;
  }

  // dests[vector][t][lane]: beta of the destinations / likelihood, times the scales that were taken out of sources and
  // edges.
  void pack_dests(int64_t dest, int64_t dest_end, Steps steps) {
    const int64_t T = shape_.targets, first_slot = T - (steps.end - 1), slot_end = T - steps.first + 1;
    for (int64_t lane = 0; lane < round_up(dest_end - dest, kProductVectors * kWidth); lane += kWidth) {
      Real* packed = scratch_.dests.get() + lane * beta_.rows;
      for (int64_t row = first_slot / kWidth * kWidth; row < slot_end; row += kWidth) {
        const IntVec shifts = Lane::load_int(scratch_.shifts.get() + row);
        Vec square[kWidth];
        for (int i = 0; i < kWidth; ++i) {
          const int64_t u = dest + lane + i;
          square[i] = Lane::splat(0);
          if (u == 0 || u >= dest_end) continue;
          const int64_t column = shape_.states - 1 - u;
          square[i] = Lane::load(beta_.mantissas(column) + row) *
                      power_of_two<Lane>(Lane::load_int(beta_.exponents(column) + row) + shifts);
        }
        Lane::transpose(square);
        for (int i = 0; i < kWidth; ++i) {
          const int64_t slot = row + i;
          if (slot >= first_slot && slot < slot_end) Lane::store(packed + (T - slot) * kWidth, square[i]);
        }
      }
    }
  }

  // Writes products times edges for the edges from v to the nodes from u on, as many as are in a vector and exist.
  void put(Vec products, int64_t v, int64_t u, Real* gradient_row) const {
    const Real* log_edges = sequence_.log_trans + v * sequence_.trans_row_stride;
    if (u > v && u + kWidth <= shape_.states) {
      Lane::store(gradient_row + u, times_edges(products, Lane::load(log_edges + u)));
      return;
    }
    const int64_t first = std::max(v + 1, u), end = std::min(u + kWidth, shape_.states);
    if (first >= end) return;
    Real part[kWidth];
    std::fill_n(part, kWidth, -std::numeric_limits<Real>::infinity());
    std::copy(log_edges + first, log_edges + end, part + (first - u));
    Lane::store(part, times_edges(products, Lane::load(part)));
    std::copy_n(part + (first - u), end - first, gradient_row + first);
  }

  Vec times_edges(Vec product, Vec log_edges) const {
    const Scaled<Lane> edge = scaled_exp<Lane>(log_edges);
    // in two halves: a faint edge can stand beside a large product, and neither half leaves the range of Real
    const IntVec exponent = edge.exponent - edge_shift_;
    const IntVec half = exponent >> 1;
    return product * power_of_two<Lane>(half) * power_of_two<Lane>(exponent - half) * edge.mantissa * scale_;
  }

  void add_exact(int64_t t, int64_t source, int64_t source_end, int64_t dest, int64_t dest_end, Real* gradient,
                 int64_t stride) {
    for (int64_t v = source; v < source_end; ++v) {
      const Scaled<Exact> from = alpha_.at(v, t);
      if (from.exponent == kDead) continue;
      for (int64_t u = std::max(dest, v + 1); u < dest_end; ++u) {
        const Scaled<Exact> to = beta_.at(shape_.states - 1 - u, shape_.targets - t);
        const Scaled<Exact> edge = scaled_exp<Exact>(sequence_.log_trans[v * sequence_.trans_row_stride + u]);
        const Int exponent = from.exponent + to.exponent + edge.exponent - likelihood_exponent_;
        gradient[v * stride + u] +=
            scale_ * from.mantissa * to.mantissa * edge.mantissa * power_of_two<Exact>(exponent);
      }
    }
  }

  const Sequence<Real>& sequence_;
  const Shape shape_;
  const Columns<Real> alpha_;
  const Columns<Real> beta_;
  GradientScratch<Real>& scratch_;
  Real scale_ = 0;
  Int likelihood_exponent_ = 0;
  Int edge_shift_ = 0;
  int64_t num_exact_ = 0;
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_GRADIENT_CPU_H_
