// Most probable path of every sequence on the device: one block of threads each, one thread per slot.
#ifndef STATES_ALIGNMENT_BEST_PATH_CUDA_CUH_
#define STATES_ALIGNMENT_BEST_PATH_CUDA_CUH_

#include "device.cuh"

namespace states_alignment {

// Scores are float64 logarithms: sums of float32 values round so little that only true ties are equal.
SA_HOST_DEVICE double log_probability(float x) {
  return x >= -static_cast<float>(kLogRange) ? static_cast<double>(x) : -static_cast<double>(INFINITY);
}

// scores and sources: (batch, max_states, rows) each, scratch. Block b writes nodes[b].
template <class Element>
SA_KERNEL void best_path_kernel(const states_alignment_batch batch, double* scores, int32_t* sources, int64_t* nodes) {
  const int64_t b = blockIdx.x;
  const Shape shape = shape_of(batch, b);
  const int64_t max_rows = round_up(batch.max_targets + 1, STATES_ALIGNMENT_ROW_PAD);
  const int64_t rows = round_up(shape.targets + 1, STATES_ALIGNMENT_ROW_PAD), end = shape.states - 1;
  const double none = -static_cast<double>(INFINITY);
  scores += b * batch.max_states * max_rows;
  sources += b * batch.max_states * max_rows;
  nodes += b * batch.max_targets;
  for (int64_t target = threadIdx.x; target < batch.max_targets; target += kThreads) nodes[target] = -1;
  if (!shape.has_path()) return;
  const View<Element> view = view_of<Element>(batch, b, shape, Direction::kForward);
  for (int64_t slot = threadIdx.x; slot <= shape.targets; slot += kThreads) scores[slot] = slot == 0 ? 0.0 : none;
  __syncthreads();
  double best = none;
  for (int64_t u = 1; u <= end; ++u) {
    for (int64_t step = threadIdx.x; step <= shape.targets; step += kThreads) {
      best = none;
      int32_t source = -1;
      for (int64_t v = step; v < at_most(u, end - shape.targets + step); ++v) {
        const double score = scores[v * rows + step] + log_probability(to_float(*view.edge(v, u)));
        if (score > best) {  // strict: of equals the lowest node stays
          best = score;
          source = static_cast<int32_t>(v);
        }
      }
      sources[u * rows + step] = source;
      if (u == end || step == shape.targets) continue;
      scores[u * rows + step + 1] = best + log_probability(to_float(*view.emission(u, step)));
    }
    if (threadIdx.x == 0 && u < end) scores[u * rows] = none;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  int64_t node = sources[end * rows + shape.targets] >= 0 ? end : -1;
  for (int64_t t = shape.targets; node >= 0 && t > 0; --t) {
    node = sources[node * rows + t];
    nodes[t - 1] = node;
  }
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_BEST_PATH_CUDA_CUH_
