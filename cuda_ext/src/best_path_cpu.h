// Most probable path of one sequence on the host (Viterbi): maxima in place of sums, then backtracking.
#ifndef STATES_ALIGNMENT_BEST_PATH_CPU_H_
#define STATES_ALIGNMENT_BEST_PATH_CPU_H_

#include <algorithm>

#include "sequence_cpu.h"

namespace states_alignment {

// Scores are float64 logarithms: sums of float32 values round so little that only true ties are equal.
struct BestPathScratch {
  BestPathScratch(int64_t states, int64_t rows)
      : scores(states * rows), sources(states * rows), log_edges(states), reach(rows + kRowPad) {}
  Buffer<double> scores;    // [node][slot]
  Buffer<int32_t> sources;  // [node][step]: the node before
  Buffer<double> log_edges;
  Buffer<double> reach;
};

template <class Real>
double log_probability(Real x) {
  return x >= -static_cast<Real>(kLogRange) ? static_cast<double>(x) : -std::numeric_limits<double>::infinity();
}

// Writes the nodes of the targets; does not write to `nodes` if every path has probability zero.
template <class Real>
void find_best_path(const Sequence<Real>& sequence, BestPathScratch& scratch, int64_t* nodes) {
  using Lane = SimdLane<double>;
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  const Shape shape = sequence.shape;
  const int64_t rows = shape.rows(kRowPad), end = shape.states - 1;
  double* scores = scratch.scores.get();
  double* reach = scratch.reach.get();
  std::fill_n(scores, shape.states * rows, kNone);
  scores[0] = 0;
  for (int64_t u = 1; u <= end; ++u) {
    for (int64_t v = 0; v < u; ++v) {
      scratch.log_edges.get()[v] = log_probability(sequence.log_trans[v * sequence.trans_row_stride + u]);
    }
    const Steps steps = Steps::into(shape, u);
    for (int64_t row = steps.first / Lane::kWidth * Lane::kWidth; row < steps.end; row += Lane::kWidth) {
      Lane::Real best = Lane::splat(kNone);
      Lane::Int source = Lane::splat_int(-1);
      for (int64_t v = 0; v < u; ++v) {
        const Lane::Real score = Lane::load(scores + v * rows + row) + scratch.log_edges.get()[v];
        const Lane::Int is_better = score > best;  // strict: of equals the lowest node stays
        best = is_better ? score : best;
        source = is_better ? Lane::splat_int(v) : source;
      }
      Lane::store(reach + row, best);
      for (int lane = 0; lane < Lane::kWidth; ++lane) {
        scratch.sources.get()[u * rows + row + lane] = static_cast<int32_t>(source[lane]);
      }
    }
    if (u == end) break;
    for (int64_t step = steps.first; step < steps.end; ++step) {
      scores[u * rows + step + 1] =
          reach[step] + log_probability(sequence.log_emit[step * sequence.emit_row_stride + u]);
    }
  }
  if (reach[shape.targets] == kNone) return;
  int64_t node = end;
  for (int64_t t = shape.targets; t > 0; --t) {
    node = scratch.sources.get()[node * rows + t];
    nodes[t - 1] = node;
  }
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_BEST_PATH_CPU_H_
