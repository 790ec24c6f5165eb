// Both gradients on the device, from the columns of the two sweeps.
#ifndef STATES_ALIGNMENT_GRADIENT_CUDA_CUH_
#define STATES_ALIGNMENT_GRADIENT_CUDA_CUH_

#include "device.cuh"

namespace states_alignment {

constexpr int kTile = 64;       // sources and destinations of one block of the transition gradient
constexpr int kTileSteps = 16;  // steps in shared memory at a time
constexpr int kPart = 4;        // sources and destinations of one thread
constexpr int kTileThreads = kTile / kPart;
constexpr int kLoads = kTile * kTileSteps / kThreads;  // numbers of each operand that a thread loads
static_assert(kTileThreads * kTileThreads == kThreads, "a thread owns kPart x kPart edges");

// alpha, beta and likelihood of a sequence with a path of positive probability.
struct Solved {
  DeviceColumns alpha;
  DeviceColumns beta;
  Number likelihood;
  bool has_path;

  SA_HOST_DEVICE static Solved of(const states_alignment_batch& batch, int32_t* saved, int64_t b, Shape shape) {
    Solved solved{DeviceColumns::in(saved, 2 * b, batch), DeviceColumns::in(saved, 2 * b + 1, batch), zero(), false};
    if (!shape.has_path()) return solved;
    solved.alpha.rows = solved.beta.rows = shape.rows(STATES_ALIGNMENT_ROW_PAD);
    solved.likelihood = solved.alpha.at(shape.states - 1, shape.targets);
    solved.has_path = solved.likelihood.mantissa != 0.0f;  // true for NaN, which then spreads
    return solved;
  }
};

struct EdgeShared {
  alignas(16) float sources[kTileSteps][kTile + 4];
  alignas(16) float dests[kTileSteps][kTile + 4];
  int32_t source_peaks[kTileSteps];
  int32_t dest_peaks[kTileSteps];
  int32_t edge_shift;  // exponent that brings the largest edge of the tile below 1
};

// The edges that one thread owns: kPart sources by kPart destinations.
template <class Element>
struct EdgePart {
  View<Element> view;
  int64_t source;
  int64_t dest;

  SA_DEVICE bool has(int i, int j) const { return source + i < dest + j && dest + j < view.shape.states; }
  SA_DEVICE float log_edge(int i, int j) const {
    return has(i, j) ? to_float(*view.edge(source + i, dest + j)) : -INFINITY;
  }
  // All of them at once, so that no load waits for another.
  SA_DEVICE void read(float (&log_edges)[kPart][kPart]) const {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) log_edges[i][j] = log_edge(i, j);
    }
  }
};

// posterior += alpha * E * beta / likelihood at one step, at any magnitude. Rarely called; it takes copies, so that the
// kernel can keep the originals in registers.
template <class Element>
SA_DEVICE_NOINLINE void add_exact(EdgePart<Element> part, Solved solved, int64_t step,
                                  float (&posterior)[kPart][kPart]) {
  const Shape& shape = part.view.shape;
  for (int i = 0; i < kPart; ++i) {
    for (int j = 0; j < kPart; ++j) {
      if (!part.has(i, j)) continue;
      const Number from = solved.alpha.at(part.source + i, step);
      const Number to = solved.beta.at(shape.states - 1 - (part.dest + j), shape.targets - step);
      const Number edge = exp_of(part.log_edge(i, j));
      posterior[i][j] += from.mantissa * to.mantissa * edge.mantissa *
                         pow2(from.exponent + to.exponent + edge.exponent - solved.likelihood.exponent);
    }
  }
}

// Loads this thread's part of one operand of the tile, and raises `peaks` to its largest exponent at each step.
SA_DEVICE void load_operand(const DeviceColumns& columns, int64_t first, int64_t end, bool is_reversed, int64_t last,
                            int64_t step, bool is_step, int32_t* peaks, Number (&numbers)[kLoads]) {
  const int column = static_cast<int>(threadIdx.x) / kTileSteps, k = static_cast<int>(threadIdx.x) % kTileSteps;
  int32_t peak = kDead;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t node = first + column + i * (kThreads / kTileSteps);
    numbers[i] = is_step && node < end ? columns.at(is_reversed ? last - node : node, step) : zero();
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) peak = larger<ScalarLane<float>>(peak, numbers[i].exponent);
  atomicMax(&peaks[k], peak);
}

// Block (b, tile of sources, tile of destinations): minus the posterior of its edges times grad_nll[b],
//
//     E[v, u] / likelihood * sum over t of alpha[v, t] * beta[u, T - t]        (beta with u's own emission)
//
// A posterior is at most 1, so alpha * beta / likelihood at a step can only be large where the edge between the two
// peaks is faint or, near the diagonal, does not exist. There the peaks hide the edges that do count, and the step is
// added edge by edge.
template <class Element>
SA_KERNEL_PER_SM(2)
void edge_gradient_kernel(const states_alignment_batch batch, int32_t* saved, const float* grad_nll,
                                    Element* grad_trans) {
  using F = Format<float>;
  SA_SHARED_MEMORY(memory);
  EdgeShared& shared = *reinterpret_cast<EdgeShared*>(memory);
  const int64_t tiles = round_up(batch.max_states, kTile) / kTile, S = batch.max_states;
  const int64_t b = blockIdx.x / (tiles * tiles);
  const int64_t tile_source = blockIdx.x / tiles % tiles * kTile, tile_dest = blockIdx.x % tiles * kTile;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / kTileThreads * kPart, lane = thread % kTileThreads * kPart;
  const Shape shape = shape_of(batch, b);
  const Solved solved = Solved::of(batch, saved, b, shape);
  const View<Element> view = view_of<Element>(batch, b, shape, Direction::kForward);
  const EdgePart<Element> part{view, tile_source + row, tile_dest + lane};
  const int64_t source_end = at_most(tile_source + kTile, shape.states - 1);
  const int64_t dest = at_least(tile_dest, 1), dest_end = at_most(tile_dest + kTile, shape.states);
  const bool has_edges = solved.has_path && tile_source < source_end && dest < dest_end && tile_source < dest_end - 1;

  float product[kPart][kPart] = {}, exact[kPart][kPart] = {};
  int32_t edge_shift = 0;
  if (has_edges) {
    if (thread == 0) shared.edge_shift = 0;
    __syncthreads();
    float log_edges[kPart][kPart], largest = 0.0f;
    part.read(log_edges);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) largest = log_edges[i][j] > largest ? log_edges[i][j] : largest;
    }
    if (largest > 0.0f) atomicMax(&shared.edge_shift, exp_of(largest).exponent + 1);
    __syncthreads();
    edge_shift = shared.edge_shift;
    const int32_t shift = edge_shift - solved.likelihood.exponent;
    const Steps steps = Steps::between(shape, tile_source, source_end, dest, dest_end);
    for (int64_t first = steps.first; first < steps.end; first += kTileSteps) {
      if (thread < kTileSteps) shared.source_peaks[thread] = shared.dest_peaks[thread] = kDead;
      __syncthreads();
      const int k = thread % kTileSteps;
      const int64_t step = first + k;
      Number sources[kLoads], dests[kLoads];
      load_operand(solved.alpha, tile_source, source_end, false, 0, step, step < steps.end, shared.source_peaks,
                   sources);
      load_operand(solved.beta, tile_dest, dest_end, true, shape.states - 1, shape.targets - step, step < steps.end,
                   shared.dest_peaks, dests);
      __syncthreads();
      const int32_t dest_peak = shared.dest_peaks[k];
      const bool is_bounded = shared.source_peaks[k] + dest_peak + shift <= F::kWide;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = thread / kTileSteps + i * (kThreads / kTileSteps);
        shared.sources[k][column] =
            is_bounded ? sources[i].mantissa * pow2(sources[i].exponent + dest_peak + shift) : 0.0f;
        shared.dests[k][column] = dests[i].mantissa * pow2(dests[i].exponent - dest_peak);
      }
      __syncthreads();
#pragma unroll
      for (int t = 0; t < kTileSteps; ++t) {
        const Quad from = *reinterpret_cast<const Quad*>(&shared.sources[t][row]);
        const Quad to = *reinterpret_cast<const Quad*>(&shared.dests[t][lane]);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
#pragma unroll
          for (int j = 0; j < kPart; ++j) product[i][j] += from.values[i] * to.values[j];
        }
      }
#pragma unroll 1
      for (int t = 0; t < kTileSteps; ++t) {
        if (shared.source_peaks[t] + shared.dest_peaks[t] + shift > F::kWide) add_exact(part, solved, first + t, exact);
      }
      __syncthreads();
    }
  }
  const float scale = has_edges ? -grad_nll[b] / solved.likelihood.mantissa : 0.0f;
  float log_edges[kPart][kPart];
  part.read(log_edges);
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (part.source + i >= S || part.dest + j >= S) continue;
      float gradient = 0.0f;
      if (has_edges && part.has(i, j)) {
        // in two halves, because a faint edge may meet a large product; neither half leaves the range of float
        const Number edge = exp_of(log_edges[i][j]);
        const int32_t exponent = edge.exponent - edge_shift, half = exponent >> 1;
        gradient = (product[i][j] * pow2(half) * pow2(exponent - half) * edge.mantissa + exact[i][j]) * scale;
      }
      store(&grad_trans[(b * S + part.source + i) * S + part.dest + j], gradient);
    }
  }
}

struct EmissionShared {
  float mantissa[kWarp][kWarp + 1];
  int32_t exponent[kWarp][kWarp + 1];
};

// Block (b, tile of targets, tile of nodes): minus the posterior alpha * beta / likelihood of its emissions, where both
// factors hold the emission, so that it is divided out once. Slots lie along the columns, gradients across them, so the
// products pass through shared memory.
template <class Element>
SA_KERNEL void emission_gradient_kernel(const states_alignment_batch batch, int32_t* saved, const float* grad_nll,
                                        Element* grad_emit) {
  SA_SHARED_MEMORY(memory);
  EmissionShared& shared = *reinterpret_cast<EmissionShared*>(memory);
  const int64_t T = batch.max_targets, S = batch.max_states;
  const int64_t target_tiles = round_up(T, kWarp) / kWarp, node_tiles = round_up(S, kWarp) / kWarp;
  const int64_t b = blockIdx.x / (target_tiles * node_tiles);
  const int64_t first_target = blockIdx.x / node_tiles % target_tiles * kWarp;
  const int64_t first_node = blockIdx.x % node_tiles * kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const Shape shape = shape_of(batch, b);
  const Solved solved = Solved::of(batch, saved, b, shape);
  const View<Element> view = view_of<Element>(batch, b, shape, Direction::kForward);
  const auto emits = [&](int64_t target, int64_t node) {
    return solved.has_path && target < shape.targets && node > 0 && node < shape.states - 1;
  };
  for (int i = warp; i < kWarp; i += kWarps) {
    const int64_t target = first_target + lane, node = first_node + i;
    Number product = zero();
    if (emits(target, node)) {
      const Number until = solved.alpha.at(node, target + 1);
      const Number from = solved.beta.at(shape.states - 1 - node, shape.targets - target);
      product = {until.mantissa * from.mantissa, until.exponent + from.exponent - solved.likelihood.exponent};
    }
    shared.mantissa[i][lane] = product.mantissa;
    shared.exponent[i][lane] = product.exponent;
  }
  __syncthreads();
  const float scale = solved.has_path ? -grad_nll[b] / solved.likelihood.mantissa : 0.0f;
  for (int i = warp; i < kWarp; i += kWarps) {
    const int64_t target = first_target + i, node = first_node + lane;
    if (target >= T || node >= S) continue;
    float gradient = 0.0f;
    if (emits(target, node)) {
      const Number emission = exp_of(to_float(*view.emission(node, target)));
      const float factor = emission.mantissa > 0.0f ? shared.mantissa[lane][i] / emission.mantissa : 0.0f;
      gradient = factor * pow2(shared.exponent[lane][i] - emission.exponent) * scale;
    }
    store(&grad_emit[(b * T + target) * S + node], gradient);
  }
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_GRADIENT_CUDA_CUH_
