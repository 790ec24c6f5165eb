// The gradients of one sequence on the host, minus the posteriors of
//
//     emissions    alpha[u, t] * beta[u, T - t] / likelihood        (beta without u's own emission)
//     edges        E[v, u] / likelihood * sum over t of alpha[v, t] * beta[u, T - t]       (with u's own emission)
//
// written while beta is summed, so that nothing of the backward sweep is computed or read twice. The edge gradient is a
// (nodes x slots) times (slots x nodes) product, by panels of sources: their rows of the gradient are contiguous in
// memory, and nothing else is written until the panel is done.
#ifndef STATES_ALIGNMENT_GRADIENT_CPU_H_
#define STATES_ALIGNMENT_GRADIENT_CPU_H_

#include <algorithm>

#include "block_product.h"
#include "sequence_cpu.h"
#include "sweep_cpu.h"

namespace states_alignment {

constexpr int64_t kPackedDests = 32;  // nodes whose beta is laid out for products together

template <class Real>
struct GradientScratch {
  using Int = typename Format<Real>::Int;
  GradientScratch(int64_t rows, int64_t states)
      : sources(kPanel * rows), source_peaks(rows), dests(kPackedDests * rows),
        dest_peaks(round_up(states, kPanel) / kPanel * rows), shifts(rows), exact_steps(rows) {}
  Buffer<Real> sources;
  Buffer<Int> source_peaks;  // of step t at slot T - t of beta
  Buffer<Real> dests;
  Buffer<Int> dest_peaks;  // of each panel of beta
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

  // `alpha` by node, `beta` by node counted from the end, as the sweeps leave them; `gradient` has `stride` columns.
  EdgeGradient(const Sequence<Real>& sequence, const Columns<Real>& alpha, const Columns<Real>& beta,
               Scaled<Exact> likelihood, Real grad_nll, Real* gradient, int64_t stride, GradientScratch<Real>& scratch)
      : sequence_(sequence), shape_(sequence.shape), alpha_(alpha), beta_(beta), scratch_(scratch),
        gradient_(gradient), stride_(stride), num_slots_(shape_.rows(kRowPad)),
        scale_(-grad_nll / likelihood.mantissa), likelihood_exponent_(likelihood.exponent) {}

  // Begins the panel of nodes [source, source_end): zeros where there is no edge.
  void begin(int64_t source, int64_t source_end) {
    // in the order of memory, which brings the panel into the cache faster than tile by tile
    std::fill_n(gradient_ + source * stride_, (source_end - source) * stride_, Real{0});
    pack_sources(source, source_end);
  }

  // Records beta of the nodes [dest, dest_end), which is complete.
  void finish(int64_t dest, int64_t dest_end) {
    for (int64_t row = 0; row < num_slots_; row += kWidth) {
      IntVec peak = Lane::splat_int(kDead);
      const Alive alive = alive_dests(dest, dest_end, row);
      for (int64_t column = alive.first; column < alive.end; ++column) {
        peak = larger<Lane>(peak, Lane::load_int(beta_.exponents(column, row)));
      }
      Lane::store_int(dest_peaks(dest_end) + row, peak);
    }
  }

  // Writes the gradient of the edges from the nodes of the panel [source, source_end) to [dest, dest_end).
  void write(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end, const EdgeTile<Real>& tile) {
    edge_shift_ =
        tile.largest_log > 0 ? std::max<Int>(scaled_exp<Exact>(tile.largest_log).exponent + 1, 0) : 0;
    tile_scale_ = scale_ * power_of_two<Exact>(-edge_shift_);
    for (int64_t u = dest; u < dest_end; u += kPanel) {
      write_tile(source, source_end, u, std::min(u + kPanel, dest_end), tile);
    }
  }

 private:
  // Smallest probability, as a power of two, that is still added to a posterior.
  static constexpr int kLeastPosterior = -F::kWide;

  void write_tile(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end, const EdgeTile<Real>& edges) {
    const Steps steps = live_steps(source, source_end, dest, dest_end);
    for (int64_t first = dest; first < dest_end && !steps.empty(); first += kPackedDests) {
      multiply(source, source_end, first, std::min(first + kPackedDests, dest_end), steps, edges);
    }
    for (int64_t i = 0; i < num_exact_; ++i) {
      add_exact(scratch_.exact_steps.get()[i], source, source_end, dest, dest_end);
    }
  }

  void multiply(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end, Steps steps,
                const EdgeTile<Real>& edges) {
    pack_dests(dest, dest_end, steps);
    for (int64_t first = source; first < source_end; first += kBlock) {
      const int64_t end = std::min(first + kBlock, source_end);
      for (int64_t u = dest; u < dest_end; u += kProductVectors * kWidth) {
        if (u + kProductVectors * kWidth <= first + 1) continue;
        const Steps taken =
            Steps::between(shape_, first, end, at_least(u, 1), std::min(u + kProductVectors * kWidth, dest_end))
                .among(steps);
        if (taken.empty()) continue;
        Vec sums[kProductVectors][kBlock] = {};
        const Real* packed_dests = scratch_.dests.get() + (u - dest) * num_slots_ + taken.first * kWidth;
        const Real* packed_sources = scratch_.sources.get() + (first - source) * num_slots_ + taken.first;
        block_product<Lane, kProductVectors>(packed_dests, num_slots_ * kWidth, packed_sources,
                                             ScalarStrides{1, num_slots_}, taken.end - taken.first, sums);
        for (int64_t v = first; v < end; ++v) {
          for (int vector = 0; vector < kProductVectors; ++vector) {
            put(sums[vector][v - first], v, u + vector * kWidth, dest_end, edges);
          }
        }
      }
    }
  }

  // sources[v][t]: alpha of the panel, each step relative to its peak.
  void pack_sources(int64_t source, int64_t source_end) {
    std::fill_n(scratch_.source_peaks.get(), num_slots_, Int{kDead});
    for (int64_t row = 0; row < num_slots_; row += kWidth) {
      const Alive alive = Alive::at(shape_, row, row + kWidth).among(source, source_end);
      IntVec peak = Lane::splat_int(kDead);
      for (int64_t v = alive.first; v < alive.end; ++v) {
        peak = larger<Lane>(peak, Lane::load_int(alpha_.exponents(v, row)));
      }
      for (int64_t t = row; t < std::min(row + kWidth, shape_.targets + 1); ++t) {
        scratch_.source_peaks.get()[shape_.targets - t] = peak[t - row];
      }
      for (int64_t v = source; v < source + round_up(source_end - source, kBlock); ++v) {
        Vec scaled = Lane::splat(0);
        if (alive.first <= v && v < alive.end) {
          scaled = Lane::load(alpha_.mantissas(v, row)) *
                   power_of_two<Lane>(Lane::load_int(alpha_.exponents(v, row)) - peak);
        }
        Lane::store(scratch_.sources.get() + (v - source) * num_slots_ + row, scaled);
      }
    }
  }

  // The steps at which some edge of the tile matters; steps whose bound does not hold go to exact_steps.
  //
  // A posterior is at most 1, so alpha * beta / likelihood can only be large where the edge between the two peaks is
  // faint or, near the diagonal, does not exist. There the peaks hide the edges that do count.
  Steps live_steps(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    const int64_t T = shape_.targets;
    const Steps possible = Steps::between(shape_, source, source_end, std::max<int64_t>(dest, 1), dest_end);
    Steps live{std::max(possible.first, possible.end), possible.first};
    num_exact_ = 0;
    const int64_t first_slot = T - (possible.end - 1), slot_end = T - possible.first + 1;
    for (int64_t row = first_slot / kWidth * kWidth; row < slot_end; row += kWidth) {
      const IntVec shift =
          Lane::load_int(scratch_.source_peaks.get() + row) + (edge_shift_ - likelihood_exponent_);
      const IntVec bound = shift + Lane::load_int(dest_peaks(dest_end) + row);
      const IntVec is_possible = (Lane::counted() >= static_cast<Int>(first_slot - row)) &
                                 (Lane::counted() < static_cast<Int>(slot_end - row));
      const IntVec is_exact = is_possible & (bound > F::kWide);
      // not part of the product: its factors may have any exponent
      Lane::store_int(scratch_.shifts.get() + row, is_exact ? Lane::splat_int(kDead) : shift);
      if (Lane::any(is_possible & ~is_exact & (bound >= kLeastPosterior))) {
        live.first = std::min(live.first, std::max(T - (row + kWidth - 1), possible.first));
        live.end = std::max(live.end, std::min(T - row + 1, possible.end));
      }
      if (!Lane::any(is_exact)) continue;
      for (int lane = 0; lane < kWidth; ++lane) {
        if (is_exact[lane]) scratch_.exact_steps.get()[num_exact_++] = T - row - lane;
      }
    }
    return live;
  }

  // By slot, the largest exponent of beta in the panel that ends with node dest_end - 1.
  Int* dest_peaks(int64_t dest_end) const {
    return scratch_.dest_peaks.get() + (shape_.states - dest_end) / kPanel * num_slots_;
  }

  // Columns of the backward sweep that hold nodes [dest, dest_end) and are alive at the vector of slots at `row`.
  Alive alive_dests(int64_t dest, int64_t dest_end, int64_t row) const {
    return Alive::at(shape_, row, row + kWidth).among(shape_.states - dest_end, shape_.states - dest);
  }

  // dests[vector][t][lane]: beta of the destinations / likelihood, times the scales that were taken out of sources and
  // edges.
  void pack_dests(int64_t dest, int64_t dest_end, Steps steps) {
    const int64_t T = shape_.targets, first_slot = T - (steps.end - 1), slot_end = T - steps.first + 1;
    for (int64_t lane = 0; lane < round_up(dest_end - dest, kProductVectors * kWidth); lane += kWidth) {
      Real* packed = scratch_.dests.get() + lane * num_slots_;
      for (int64_t row = first_slot / kWidth * kWidth; row < slot_end; row += kWidth) {
        const IntVec shifts = Lane::load_int(scratch_.shifts.get() + row);
        Vec square[kWidth];
        const Alive alive = alive_dests(dest, dest_end, row);
        for (int i = 0; i < kWidth; ++i) {
          const int64_t column = shape_.states - 1 - (dest + lane + i);
          square[i] = Lane::splat(0);
          if (column < alive.first || column >= alive.end) continue;
          square[i] = Lane::load(beta_.mantissas(column, row)) *
                      power_of_two<Lane>(Lane::load_int(beta_.exponents(column, row)) + shifts);
        }
        Lane::transpose(square);
        for (int i = 0; i < kWidth; ++i) {
          const int64_t slot = row + i;
          if (slot >= first_slot && slot < slot_end) Lane::store(packed + (T - slot) * kWidth, square[i]);
        }
      }
    }
  }

  // Writes products times edges for the edges from v to the nodes from u on, as many as are in a vector and before
  // `dest_end`; zeros up to v.
  void put(Vec products, int64_t v, int64_t u, int64_t dest_end, const EdgeTile<Real>& edges) const {
    if (u + kWidth <= v + 1 || u >= dest_end) return;
    const Vec gradient = edges.largest_log > F::kLogSteep
                             ? times_edges(products, sequence_.edges(v, u))
                             : products * (Lane::load(edges.at(v, u)) * tile_scale_);
    store(gradient_ + v * stride_ + u, gradient, dest_end - u);
  }

  // The first `count` lanes, at most all.
  static void store(Real* to, Vec values, int64_t count) {
    if (count >= kWidth) {
      Lane::store(to, values);
    } else {
      memcpy(to, &values, static_cast<size_t>(count) * sizeof(Real));
    }
  }

  // Products times edges of any magnitude, by their scores.
  Vec times_edges(Vec product, Vec log_edges) const {
    const Scaled<Lane> edge = scaled_exp<Lane>(log_edges);
    // in two halves, because a faint edge may meet a large product; neither half leaves the range of Real
    const IntVec exponent = edge.exponent - edge_shift_;
    const IntVec half = exponent >> 1;
    return product * power_of_two<Lane>(half) * power_of_two<Lane>(exponent - half) * edge.mantissa * scale_;
  }

  // Adds the posteriors of the edges of a tile at step t, at any magnitude.
  void add_exact(int64_t t, int64_t source, int64_t source_end, int64_t dest, int64_t dest_end) {
    const int64_t slot = shape_.targets - t, last = shape_.states - 1;
    Real mantissas[kPanel] = {};
    Int exponents[kPanel];
    std::fill_n(exponents, kPanel, Int{kDead});
    const Alive columns = Alive::at(shape_, slot, slot + 1).among(last + 1 - dest_end, last + 1 - dest);
    for (int64_t column = columns.first; column < columns.end; ++column) {
      const Scaled<Exact> beta = beta_.at(column, slot);
      mantissas[last - column - dest] = beta.mantissa;
      exponents[last - column - dest] = beta.exponent;
    }
    const Alive sources = Alive::at(shape_, t, t + 1).among(source, source_end);
    for (int64_t v = sources.first; v < sources.end; ++v) {
      const Scaled<Exact> from = alpha_.at(v, t);
      if (from.exponent == kDead) continue;
      for (int64_t u = dest; u < dest_end; u += kWidth) {
        if (u + kWidth <= v + 1) continue;
        const Scaled<Lane> edge = scaled_exp<Lane>(sequence_.edges(v, u));
        const IntVec exponent =
            Lane::load_int(exponents + u - dest) + edge.exponent + (from.exponent - likelihood_exponent_);
        const Vec posterior = Lane::load(mantissas + u - dest) * edge.mantissa * power_of_two<Lane>(exponent);
        Real* to = gradient_ + v * stride_ + u;
        const int64_t left = dest_end - u;
        const Vec before = left >= kWidth ? Lane::load(to) : Lane::load(to, left, Real{0});
        store(to, before + posterior * (scale_ * from.mantissa), left);
      }
    }
  }

  const Sequence<Real>& sequence_;
  const Shape shape_;
  const Columns<Real> alpha_;
  const Columns<Real> beta_;
  GradientScratch<Real>& scratch_;
  Real* gradient_;
  const int64_t stride_;
  const int64_t num_slots_;
  const Real scale_;
  const Int likelihood_exponent_;
  Int edge_shift_ = 0;    // brings the largest edge of the tile below 1
  Real tile_scale_ = 0;   // scale / 2^edge_shift
  int64_t num_exact_ = 0;
};

// Writer of the gradients of one sequence during its backward sweep.
template <class RealType>
class Gradients {
 public:
  using Real = RealType;
  using Lane = SimdLane<Real>;
  using Exact = ScalarLane<Real>;
  using Int = typename Format<Real>::Int;
  using Vec = typename Lane::Real;
  static constexpr bool kKeeps = true;

  // grad_emit (targets x stride) and grad_trans (stride x stride) may each be null.
  Gradients(const Sequence<Real>& sequence, const Columns<Real>& alpha, const Columns<Real>& beta, Real grad_nll,
            Real* grad_emit, Real* grad_trans, int64_t stride, GradientScratch<Real>& scratch)
      : shape_(sequence.shape), alpha_(alpha), likelihood_(alpha.at(shape_.states - 1, shape_.targets)),
        scale_(-grad_nll / likelihood_.mantissa), grad_emit_(grad_emit), grad_trans_(grad_trans), stride_(stride),
        edges_(sequence, alpha, beta, likelihood_, grad_nll, grad_trans, stride, scratch) {}

  Vec keep(int64_t column, int64_t row, const Scaled<Lane>& reach) const {
    // alpha at the slots T - row, T - row - 1 and so on: parts of two vectors, where the second may not exist
    const int64_t node = shape_.states - 1 - column, last = shape_.targets - row;
    const int64_t high = last / Lane::kWidth * Lane::kWidth, low = std::max<int64_t>(high - Lane::kWidth, 0);
    const int64_t offset = last - high + 1;
    const auto exponent = reach.exponent - likelihood_.exponent +
                          Lane::window_reversed(Lane::load_int(alpha_.exponents(node, low)),
                                                Lane::load_int(alpha_.exponents(node, high)), offset);
    const Vec mantissa = Lane::window_reversed(Lane::load(alpha_.mantissas(node, low)),
                                               Lane::load(alpha_.mantissas(node, high)), offset);
    return scale_ * (reach.mantissa * mantissa * power_of_two<Lane>(exponent));
  }
  void write_kept(int64_t node, int64_t step, Vec posteriors) const {
    if (!grad_emit_) return;
    Real* to = grad_emit_ + (shape_.targets - 1 - step) * stride_ + node;
    if (node >= 0 && node + Lane::kWidth <= shape_.states) {
      Lane::store(to, posteriors);
      return;
    }
    for (int64_t i = std::max<int64_t>(-node, 0); i < std::min<int64_t>(shape_.states - node, Lane::kWidth); ++i) {
      to[i] = posteriors[i];
    }
  }
  void begin(int64_t first, int64_t end) {
    if (grad_trans_) edges_.begin(shape_.states - end, shape_.states - first);
  }
  void see_edges(int64_t source, int64_t source_end, int64_t dest, int64_t dest_end, const EdgeTile<Real>& tile) {
    if (!grad_trans_) return;
    const int64_t states = shape_.states;
    if (source == dest) edges_.finish(states - dest_end, states - dest);
    edges_.write(states - dest_end, states - dest, states - source_end, states - source, tile);
  }

 private:
  const Shape shape_;
  const Columns<Real> alpha_;
  const Scaled<Exact> likelihood_;
  const Real scale_;
  Real* grad_emit_;
  Real* grad_trans_;
  const int64_t stride_;
  EdgeGradient<Real> edges_;
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_GRADIENT_CPU_H_
