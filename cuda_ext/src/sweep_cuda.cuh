// Both sweeps of every sequence on the device: one block of threads each, all in one launch.
//
// Columns are taken in panels of kPanel. For a panel, the block
//   1. sums over all columns before it: a lane owns kRowsPerLane slots, a warp every kWarps-th chunk of sources, so
//      that an edge is exponentiated once for all slots of the block and a slot is read once for kPanel edges;
//   2. completes its columns one after the other, a thread owning one slot; slot t + 1 passes to its neighbour.
// So a sequence costs S dependent steps of one barrier each, not T steps that each read all of its edges again.
#ifndef STATES_ALIGNMENT_SWEEP_CUDA_CUH_
#define STATES_ALIGNMENT_SWEEP_CUDA_CUH_

#include "device.cuh"

namespace states_alignment {

constexpr int kPanel = 16;
constexpr int kQuads = kPanel / 4;
constexpr int kPanelStride = kPanel + 4;  // rows of whole quads whose starts spread over the banks

template <int kRowsPerLane>
struct alignas(16) SweepShared {
  static constexpr int kRows = kWarp * kRowsPerLane;
  float sums[kWarps][kPanel][kRows];
  float edges[kWarps][kPanel][kPanelStride];
  float panel_edges[kPanel][kPanelStride];
  float passed_mantissa[2][kRows + 1];
  int32_t passed_exponent[2][kRows + 1];
  int32_t is_faint_row[kRows];
  int32_t has_faint_edge;
  int32_t has_steep_edge;
  int32_t is_invalid;
};

// exp of an edge for block products. Notes what products cannot hold: edges that underflow, and those left out as too
// large, whose column is then summed exactly.
template <class Shared>
SA_DEVICE float linear_edge(float log_edge, Shared& shared) {
  if (is_invalid(log_edge)) shared.is_invalid = 1;
  const Number edge = exp_of(log_edge);
  if (edge.exponent > kDead && edge.exponent < -Format<float>::kWide) shared.has_faint_edge = 1;
  if (edge.exponent <= Format<float>::kWide) return edge.mantissa * pow2(edge.exponent);
  shared.has_steep_edge = 1;
  return 0.0f;
}

// Sum at `step` over all columns before `column`, at any magnitude; slow, for the sums that products cannot hold.
template <class Element>
SA_DEVICE_NOINLINE Number exact_sum(const View<Element>& view, const DeviceColumns& columns, int64_t column,
                                    int64_t step) {
  // columns whose slot `step` can be alive: a column holds no more targets than its number
  const int64_t last = at_most(column, view.shape.states - 1 - view.shape.targets + step);
  int32_t peak = kDead;
  for (int64_t v = step; v < last; ++v) {
    peak = larger<ScalarLane<float>>(
        peak, columns.exponent[v * columns.rows + step] + exp_of(to_float(*view.edge(v, column))).exponent);
  }
  float sum = 0.0f;
  for (int64_t v = step; v < last; ++v) {
    const Number source = columns.at(v, step), edge = exp_of(to_float(*view.edge(v, column)));
    sum += source.mantissa * edge.mantissa * pow2(source.exponent + edge.exponent - peak);
  }
  return normal(sum, peak);
}

// Step 1 for the slots [first_row, first_row + kRows): each warp leaves its share of the sums in shared memory.
template <class Element, int kRowsPerLane>
SA_DEVICE void add_products(const View<Element>& view, const DeviceColumns& columns, const int32_t* peaks,
                            int64_t panel, int64_t width, int64_t first_row, SweepShared<kRowsPerLane>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  float sum[kRowsPerLane][kPanel];
  int32_t peak[kRowsPerLane];
  bool is_faint[kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int64_t row = first_row + i * kWarp + lane;
    peak[i] = row < columns.rows ? peaks[row] : kDead;
    is_faint[i] = false;
#pragma unroll
    for (int column = 0; column < kPanel; ++column) sum[i][column] = 0.0f;
  }
  for (int64_t source = warp * kPanel; source < panel; source += kWarps * kPanel) {
    const Steps steps = Steps::between(view.shape, source, source + kPanel, panel, panel + width);
    if (at_most(steps.end, first_row + kWarp * kRowsPerLane) <= at_least(steps.first, first_row)) continue;
    // the lanes of half a warp read neighbours in memory: destinations forwards, sources backwards
    const bool along_dests = view.dest_stride == 1;
#pragma unroll
    for (int i = 0; i < kPanel / 2; ++i) {
      const int fast = lane % kPanel, slow = 2 * i + lane / kPanel;
      const int k = along_dests ? slow : fast, column = along_dests ? fast : slow;
      shared.edges[warp][k][column] =
          column < width ? linear_edge(to_float(*view.edge(source + k, panel + column)), shared) : 0.0f;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int64_t first = first_row + i * kWarp;
      if (at_most(steps.end, first + kWarp) <= at_least(steps.first, first)) continue;  // the same for all lanes
      const int64_t row = at_most(first + lane, columns.rows - 1);
#pragma unroll 4
      for (int k = 0; k < kPanel; ++k) {
        const Number alpha = columns.at(source + k, row);
        const int32_t exponent = alpha.exponent - peak[i];
        is_faint[i] |= alpha.exponent > kDead && exponent < -Format<float>::kWide;
        const float value = alpha.mantissa * pow2(exponent);
        const Quad* edges = reinterpret_cast<const Quad*>(shared.edges[warp][k]);
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          const Quad edge = edges[quad];
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][4 * quad + j] += value * edge.values[j];
        }
      }
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    if (is_faint[i]) shared.is_faint_row[i * kWarp + lane] = 1;
#pragma unroll
    for (int column = 0; column < kPanel; ++column) shared.sums[warp][column][i * kWarp + lane] = sum[i][column];
  }
}

// Step 2 for the same slots. Returns through next_peaks the peaks with this panel's columns counted in.
template <class Element, int kRowsPerLane>
SA_DEVICE void solve_panel(const View<Element>& view, const DeviceColumns& columns, const int32_t* peaks,
                           int32_t* next_peaks, int64_t panel, int64_t width, int64_t first_row,
                           SweepShared<kRowsPerLane>& shared) {
  using F = Format<float>;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t step = first_row + thread, last_column = view.shape.states - 1;
  const bool is_active = thread < SweepShared<kRowsPerLane>::kRows && step < columns.rows;
  float sum[kPanel], log_emission[kPanel];
  int32_t scale = kDead, peak = kDead, next_peak = kDead;  // sums are relative to 2^scale, peak is the largest source
  bool is_faint = false;
  if (is_active) {
    scale = peak = peaks[step];
    is_faint = shared.is_faint_row[thread] != 0;
#pragma unroll
    for (int i = 0; i < kPanel; ++i) {
      sum[i] = 0.0f;
      for (int warp = 0; warp < kWarps; ++warp) sum[i] += shared.sums[warp][i][thread];
      const bool emits = i < width && panel + i > 0 && panel + i < last_column && step < view.shape.targets;
      log_emission[i] = emits ? to_float(*view.emission(panel + i, step)) : -INFINITY;
      if (is_invalid(log_emission[i])) shared.is_invalid = 1;
    }
  }
#pragma unroll
  for (int i = 0; i < kPanel; ++i) {
    if (i >= width) break;
    const int64_t column = panel + i;
    if (is_active) {
      Number reach = normal(sum[i], scale);
      const bool is_small = sum[i] < pow2(F::kLeastSum + peak - scale) && (is_faint || shared.has_faint_edge);
      if (peak > kDead && (is_small || shared.has_steep_edge)) reach = exact_sum(view, columns, column, step);
      if (column == last_column) {
        if (step == view.shape.targets) columns.put(column, step, reach);
      } else {
        const Number emission = exp_of(log_emission[i]);
        const Number value = normal(reach.mantissa * emission.mantissa, reach.exponent + emission.exponent);
        if (step + 1 < columns.rows) columns.put(column, step + 1, value);
        next_peak = larger<ScalarLane<float>>(next_peak, value.exponent);
        shared.passed_mantissa[i & 1][thread + 1] = value.mantissa;
        shared.passed_exponent[i & 1][thread + 1] = value.exponent;
        if (thread == 0) {
          // slot 0 is dead but at the start; any other was left by the slots before these
          const Number before = step > 0 ? columns.at(column, step) : column == 0 ? Number{1.0f, 0} : zero();
          if (step == 0) columns.put(column, 0, before);
          shared.passed_mantissa[i & 1][0] = before.mantissa;
          shared.passed_exponent[i & 1][0] = before.exponent;
        }
      }
    }
    __syncthreads();
    if (is_active && column < last_column) {
      const Number source{shared.passed_mantissa[i & 1][thread], shared.passed_exponent[i & 1][thread]};
      if (source.exponent > kDead) {
        if (scale == kDead) {
          scale = source.exponent;
        } else if (source.exponent > scale + F::kWide) {
          const float factor = pow2(scale - source.exponent);
#pragma unroll
          for (int j = i + 1; j < kPanel; ++j) sum[j] *= factor;
          scale = source.exponent;
          is_faint = true;
        }
        is_faint |= source.exponent < scale - F::kWide;
        peak = larger<ScalarLane<float>>(peak, source.exponent);
        const float value = source.mantissa * pow2(source.exponent - scale);
#pragma unroll
        for (int j = i + 1; j < kPanel; ++j) sum[j] += value * shared.panel_edges[i][j];
      }
    }
  }
  if (is_active) {
    if (step + 1 < columns.rows) next_peaks[step + 1] = larger<ScalarLane<float>>(peaks[step + 1], next_peak);
    if (step == 0) next_peaks[0] = 0;  // the start
  }
}

// Block b * num_sweeps + sweep: sweep 0 fills alpha and nll[b], sweep 1 beta.
template <class Element, int kRowsPerLane>
SA_KERNEL void sweep_kernel(const states_alignment_batch batch, float* nll, int32_t* saved, int num_sweeps) {
  using Shared = SweepShared<kRowsPerLane>;
  SA_SHARED_MEMORY(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t b = blockIdx.x / num_sweeps;
  const bool is_forward = blockIdx.x % num_sweeps == 0;
  const Shape shape = shape_of(batch, b);
  if (!shape.has_path()) {
    if (is_forward && thread == 0) nll[b] = INFINITY;
    return;
  }
  const View<Element> view =
      view_of<Element>(batch, b, shape, is_forward ? Direction::kForward : Direction::kBackward);
  DeviceColumns columns = DeviceColumns::in(saved, blockIdx.x, batch);
  columns.rows = shape.rows(STATES_ALIGNMENT_ROW_PAD);
  for (int64_t row = thread; row < 2 * columns.rows; row += kThreads) columns.peaks[row] = kDead;
  if (thread == 0) shared.is_invalid = 0;
  for (int64_t panel = 0; panel < shape.states; panel += kPanel) {
    const int64_t width = at_most(kPanel, shape.states - panel);
    const int32_t* peaks = columns.peaks + panel / kPanel % 2 * columns.rows;
    int32_t* next_peaks = columns.peaks + (panel / kPanel + 1) % 2 * columns.rows;
    if (thread == 0) shared.has_faint_edge = shared.has_steep_edge = 0;
    __syncthreads();
    if (thread < kPanel * kPanel) {
      const int v = thread / kPanel, u = thread % kPanel;
      shared.panel_edges[v][u] =
          v < u && u < width ? linear_edge(to_float(*view.edge(panel + v, panel + u)), shared) : 0.0f;
    }
    for (int64_t first_row = 0; first_row < columns.rows; first_row += Shared::kRows) {
      if (thread < Shared::kRows) shared.is_faint_row[thread] = 0;
      __syncthreads();
      add_products(view, columns, peaks, panel, width, first_row, shared);
      __syncthreads();
      solve_panel(view, columns, peaks, next_peaks, panel, width, first_row, shared);
    }
    __syncthreads();
  }
  if (is_forward && thread == 0) {
    Number likelihood = columns.at(shape.states - 1, shape.targets);
    if (shared.is_invalid) {
      likelihood.mantissa = NAN;
      columns.put(shape.states - 1, shape.targets, likelihood);
    }
    nll[b] = likelihood.mantissa == 0.0f
                 ? INFINITY
                 : static_cast<float>(-(log(static_cast<double>(likelihood.mantissa)) +
                                        static_cast<double>(likelihood.exponent) * 0.6931471805599453));
  }
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SWEEP_CUDA_CUH_
