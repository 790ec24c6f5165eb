// The transition gradient of one sequence on the host: minus the posterior of every edge,
//
//     E[v, u] / likelihood * sum over t of alpha[v, t] * beta[u, T - t]        (beta with u's own emission)
//
// a (nodes x slots) times (slots x nodes) product, in tiles of sources by destinations.
#ifndef STATES_ALIGNMENT_GRADIENT_CPU_H_
#define STATES_ALIGNMENT_GRADIENT_CPU_H_

#include <algorithm>

#include "block_product.h"
#include "sequence_cpu.h"

namespace states_alignment {

constexpr int64_t kTileSources = 32;
constexpr int64_t kTileDests = 64;

template <class Real>
struct GradientScratch {
  using Int = typename Format<Real>::Int;
  GradientScratch(int64_t rows)
      : dests(kTileDests * rows), dest_peaks(rows), beta_peaks(rows), scaled(rows), sources(kBlock * rows),
        source_peaks(rows), exact_steps(rows), log_edges(kTileSources * kTileDests),
        products(kTileSources * kTileDests) {}
  Buffer<Real> dests;
  Buffer<Int> dest_peaks;
  Buffer<Int> beta_peaks;
  Buffer<Real> scaled;
  Buffer<Real> sources;
  Buffer<Int> source_peaks;
  Buffer<int64_t> exact_steps;
  Buffer<Real> log_edges;
  Buffer<Real> products;
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

  // Writes gradient[v * row_stride + u] for all v < u of the sequence, and zeros at u <= v in the tiles it crosses.
  void write(Scaled<Exact> likelihood, Real grad_nll, Real* gradient, int64_t row_stride) {
    scale_ = -grad_nll / likelihood.mantissa;
    likelihood_exponent_ = likelihood.exponent;
    for (int64_t dest = 0; dest < shape_.states; dest += kTileDests) {
      pack_dests(dest, std::min(dest + kTileDests, shape_.states));
      const int64_t source_end = std::min(dest + kTileDests, shape_.states) - 1;
      for (int64_t source = 0; source < source_end; source += kTileSources) {
        tile(source, std::min(source + kTileSources, source_end), dest, gradient, row_stride);
      }
    }
  }

 private:
  // Smallest probability, as a power of two, that is still added to a posterior.
  static constexpr int kLeastPosterior = -F::kWide;

  void tile(int64_t source, int64_t source_end, int64_t dest, Real* gradient, int64_t row_stride) {
    const int64_t dest_end = std::min(dest + kTileDests, shape_.states);
    width_ = round_up(dest_end - dest, kProductVectors * kWidth);
    read_edges(source, source_end, dest, dest_end);
    const Steps steps = live_steps(source, source_end, dest, dest_end);
    if (steps.empty()) {
      std::fill_n(scratch_.products.get(), kTileSources * kTileDests, Real{0});
    } else {
      for (int64_t first = source; first < source_end; first += kBlock) {
        pack_sources(first, std::min(first + kBlock, source_end), steps);
        multiply(steps, scratch_.products.get() + (first - source) * kTileDests);
      }
    }
    for (int64_t v = source; v < source_end; ++v) finish_row(v - source, dest_end - dest, gradient + v * row_stride + dest);
    for (int64_t i = 0; i < num_exact_; ++i) {
      add_exact(scratch_.exact_steps.get()[i], source, source_end, dest, dest_end, gradient, row_stride);
    }
  }

  // log_edges[v][u] of the tile, -inf where there is none, and the shift that brings the largest edge below 1.
  void read_edges(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    Real* log_edges = scratch_.log_edges.get();
    std::fill_n(log_edges, (source_end - source) * kTileDests, -std::numeric_limits<Real>::infinity());
    Vec largest = Lane::splat(0);
    for (int64_t v = source; v < source_end; ++v) {
      Real* row = log_edges + (v - source) * kTileDests;
      const int64_t first = std::max(dest, v + 1);
      if (first >= dest_end) continue;
      std::copy_n(sequence_.log_trans + v * sequence_.trans_row_stride + first, dest_end - first, row + (first - dest));
      for (int64_t lane = 0; lane < width_; lane += kWidth) {
        const Vec log_edge = Lane::load(row + lane);
        largest = log_edge > largest ? log_edge : largest;
      }
    }
    edge_shift_ = 0;
    for (int lane = 0; lane < kWidth; ++lane) {
      if (largest[lane] > 0) edge_shift_ = std::max(edge_shift_, scaled_exp<Exact>(largest[lane]).exponent + 1);
    }
  }

  // dests[vector][t][lane]: beta of the destinations, each step relative to its peak.
  void pack_dests(int64_t dest, int64_t dest_end) {
    const int64_t T = shape_.targets, rows = beta_.rows;
    Int* peaks = scratch_.beta_peaks.get();  // by slot of beta, which is T - t
    std::fill_n(peaks, rows, Int{kDead});
    std::fill_n(scratch_.dests.get(), kTileDests * rows, Real{0});
    for (int64_t u = std::max<int64_t>(dest, 1); u < dest_end; ++u) {
      const Int* exponents = beta_.exponents(shape_.states - 1 - u);
      for (int64_t row = 0; row < rows; row += kWidth) {
        Lane::store_int(peaks + row, larger<Lane>(Lane::load_int(peaks + row), Lane::load_int(exponents + row)));
      }
    }
    for (int64_t t = 0; t <= T; ++t) scratch_.dest_peaks.get()[t] = peaks[T - t];
    for (int64_t u = std::max<int64_t>(dest, 1); u < dest_end; ++u) {
      const Int* exponents = beta_.exponents(shape_.states - 1 - u);
      const Real* mantissas = beta_.mantissas(shape_.states - 1 - u);
      Real* scaled = scratch_.scaled.get();
      for (int64_t row = 0; row < rows; row += kWidth) {
        const IntVec exponent = Lane::load_int(exponents + row) - Lane::load_int(peaks + row);
        Lane::store(scaled + row, Lane::load(mantissas + row) * power_of_two<Lane>(exponent));
      }
      Real* packed = scratch_.dests.get() + (u - dest) / kWidth * rows * kWidth + (u - dest) % kWidth;
      for (int64_t t = 0; t <= T; ++t) packed[t * kWidth] = scaled[T - t];
    }
  }

  // The steps at which some edge of the tile matters; those whose bound is no bound go to exact_steps.
  //
  // A posterior is at most 1, so alpha * beta / likelihood can only be large where the edge between the two peaks is
  // faint or, near the diagonal, does not exist. There the peaks hide the edges that do count.
  Steps live_steps(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    Int* peaks = scratch_.source_peaks.get();
    std::fill_n(peaks, alpha_.rows, Int{kDead});
    for (int64_t v = source; v < source_end; ++v) {
      const Int* exponents = alpha_.exponents(v);
      for (int64_t t = 0; t < alpha_.rows; ++t) peaks[t] = std::max(peaks[t], exponents[t]);
    }
    const Steps possible = Steps::between(shape_, source, source_end, std::max<int64_t>(dest, 1), dest_end);
    Steps live{possible.end, possible.first};
    num_exact_ = 0;
    for (int64_t t = possible.first; t < possible.end; ++t) {
      const Int bound = peaks[t] + scratch_.dest_peaks.get()[t] + shift();
      if (bound < kLeastPosterior) continue;
      if (bound > F::kWide) {
        scratch_.exact_steps.get()[num_exact_++] = t;
        continue;
      }
      live.first = std::min(live.first, t);
      live.end = std::max(live.end, t + 1);
    }
    return live;
  }

  // sources[column][t]: alpha / likelihood, times the scales that were taken out of destinations and edges.
  void pack_sources(int64_t source, int64_t source_end, Steps steps) {
    for (int64_t row = steps.first / kWidth * kWidth; row < steps.end; row += kWidth) {
      const IntVec shifts = Lane::load_int(scratch_.dest_peaks.get() + row) + shift();
      const IntVec counts = Lane::load_int(scratch_.source_peaks.get() + row) + shifts <= F::kWide;
      for (int64_t v = source; v < source + kBlock; ++v) {
        Vec scaled = Lane::splat(0);
        if (v < source_end) {
          const IntVec exponent = Lane::load_int(alpha_.exponents(v) + row) + shifts;
          // a step that is left out may have any exponent, and infinity times zero is not zero
          scaled = Lane::load(alpha_.mantissas(v) + row) *
                   power_of_two<Lane>(counts ? exponent : Lane::splat_int(kDead));
        }
        Lane::store(scratch_.sources.get() + (v - source) * alpha_.rows + row, scaled);
      }
    }
  }

  // products[column][dest lane] of one block of sources.
  void multiply(Steps steps, Real* products) {
    for (int64_t lane = 0; lane < width_; lane += kProductVectors * kWidth) {
      Vec sums[kProductVectors][kBlock];
      block_product<Lane, kProductVectors>(scratch_.dests.get() + lane * beta_.rows + steps.first * kWidth,
                                           beta_.rows * kWidth, scratch_.sources.get() + steps.first,
                                           ScalarStrides{1, alpha_.rows}, steps.end - steps.first, sums);
      for (int vector = 0; vector < kProductVectors; ++vector) {
        for (int column = 0; column < kBlock; ++column) {
          Lane::store(products + column * kTileDests + lane + vector * kWidth, sums[vector][column]);
        }
      }
    }
  }

  // One row of the tile: products times edges.
  void finish_row(int64_t row, int64_t width, Real* gradient) {
    Real* products = scratch_.products.get() + row * kTileDests;
    for (int64_t lane = 0; lane < width_; lane += kWidth) {
      const Scaled<Lane> edge = scaled_exp<Lane>(Lane::load(scratch_.log_edges.get() + row * kTileDests + lane));
      // in two halves: a faint edge can stand beside a large product, and neither half leaves the range of Real
      const IntVec exponent = edge.exponent - edge_shift_;
      const IntVec half = exponent >> 1;
      const Vec product = Lane::load(products + lane) * power_of_two<Lane>(half);
      Lane::store(products + lane, product * power_of_two<Lane>(exponent - half) * edge.mantissa * scale_);
    }
    std::copy_n(products, width, gradient);
  }

  void add_exact(int64_t t, int64_t source, int64_t source_end, int64_t dest, int64_t dest_end, Real* gradient,
                 int64_t row_stride) {
    for (int64_t v = source; v < source_end; ++v) {
      const Scaled<Exact> from = alpha_.at(v, t);
      if (from.exponent == kDead) continue;
      for (int64_t u = std::max(dest, v + 1); u < dest_end; ++u) {
        const Scaled<Exact> to = beta_.at(shape_.states - 1 - u, shape_.targets - t);
        const Scaled<Exact> edge = scaled_exp<Exact>(sequence_.log_trans[v * sequence_.trans_row_stride + u]);
        const Int exponent = from.exponent + to.exponent + edge.exponent - likelihood_exponent_;
        gradient[v * row_stride + u] +=
            scale_ * from.mantissa * to.mantissa * edge.mantissa * power_of_two<Exact>(exponent);
      }
    }
  }

  Int shift() const { return edge_shift_ - likelihood_exponent_; }

  const Sequence<Real>& sequence_;
  const Shape shape_;
  const Columns<Real> alpha_;
  const Columns<Real> beta_;
  GradientScratch<Real>& scratch_;
  Real scale_ = 0;
  Int likelihood_exponent_ = 0;
  Int edge_shift_ = 0;
  int64_t width_ = 0;  // destinations of the tile, in whole products
  int64_t num_exact_ = 0;
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_GRADIENT_CPU_H_
