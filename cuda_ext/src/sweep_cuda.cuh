// Both sweeps of every sequence on the device: one block of threads for each kRows slots, all in one launch.
//
// Columns are taken in panels of kPanel. For a panel, a block
//   1. sums over all columns before it: a lane owns kRowsPerLane slots, a warp every kWarps-th chunk of sources, so
//      that an edge is exponentiated once for all slots of the block and a slot is read once for kPanel edges;
//   2. completes its columns one after the other, a thread owning one slot; slot t + 1 passes to its neighbour.
// So a sequence costs S dependent steps of one barrier each, not T steps that each read all of its edges again. Slot
// t + 1 of the last thread is the first slot of the next block, which follows one panel behind.
#ifndef STATES_ALIGNMENT_SWEEP_CUDA_CUH_
#define STATES_ALIGNMENT_SWEEP_CUDA_CUH_

#include "device.cuh"

namespace states_alignment {

constexpr int kPanel = 16;
constexpr int kQuads = kPanel / 4;
constexpr int kBatch = 4;  // sources whose slots are loaded together
constexpr int kPanelStride = kPanel + 4;  // rows of whole quads whose starts spread over the banks

template <int kRowsPerLane>
struct alignas(16) SweepShared {
  static constexpr int kRows = kWarp * kRowsPerLane;
  float sums[kWarps][kPanel][kRows];
  float edges[kWarps][kPanel][kPanelStride];
  float panel_edges[kPanel][kPanelStride];
  float emission_mantissas[kPanel][kRows + 1];
  int32_t emission_exponents[kPanel][kRows + 1];
  // Slot t + 1 of a column, written by the thread of slot t; [0] comes from the block before. Indexed by the parity of
  // the column, so that one barrier separates writing from reading.
  Number passed[2][kRows + 1];
  Number before[kPanel];  // first slot of each column
  int32_t peaks[kRows];   // largest exponent of each slot over all columns so far
  int32_t is_faint_row[kRows];
  int32_t ticket;
  int32_t has_faint_edge;
  int32_t has_steep_edge;
  int32_t is_invalid;
};

// Cases that block products cannot handle: edges that underflow beside a small alpha, and edges that are too large;
// their columns are summed exactly. Also values that are not log probabilities.
struct EdgeFlags {
  bool has_faint = false;
  bool has_steep = false;
  bool has_invalid = false;

  template <class Shared>
  SA_DEVICE void publish(Shared& shared) const {
    if (has_faint) shared.has_faint_edge = 1;
    if (has_steep) shared.has_steep_edge = 1;
    if (has_invalid) shared.is_invalid = 1;
  }
};

// exp of an edge for block products.
SA_DEVICE float linear_edge(float log_edge, EdgeFlags& flags) {
  const Number edge = exp_of(log_edge);
  const bool is_steep = edge.exponent > Format<float>::kSteep;
  flags.has_faint |= edge.exponent > kDead && edge.exponent < -Format<float>::kWide;
  flags.has_steep |= is_steep;
  flags.has_invalid |= is_invalid(log_edge);
  return is_steep ? 0.0f : edge.mantissa * pow2(edge.exponent);
}

// Whether 2^exponent is alive and below 2^-kWide, in one comparison; dead exponents lie below -kMaxExponent.
SA_DEVICE bool is_faint_exponent(int32_t exponent) {
  return static_cast<uint32_t>(exponent + kMaxExponent) < static_cast<uint32_t>(kMaxExponent - Format<float>::kWide);
}

// Sum at `step` over all columns before `column`, at any magnitude; slow, for sums that products cannot handle.
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

// The emissions of a panel to shared memory; neighbouring threads read neighbouring nodes.
template <class Element, int kRowsPerLane>
SA_DEVICE void read_emissions(const View<Element>& view, int64_t panel, int64_t first_row,
                              SweepShared<kRowsPerLane>& shared) {
  constexpr int kRows = SweepShared<kRowsPerLane>::kRows;
  static_assert(kRows * kPanel % kThreads == 0, "all threads read equally many");
  constexpr int kEach = kRows * kPanel / kThreads;
  const int i = static_cast<int>(threadIdx.x) % kPanel, thread_row = static_cast<int>(threadIdx.x) / kPanel;
  const int64_t column = panel + i, last_column = view.shape.states - 1;
  float log_emissions[kEach];  // all loads before their first use
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int64_t step = first_row + thread_row + k * (kThreads / kPanel);
    const bool emits = column > 0 && column < last_column && step < view.shape.targets;
    log_emissions[k] = emits ? to_float(*view.emission(column, step)) : -INFINITY;
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int row = thread_row + k * (kThreads / kPanel);
    if (is_invalid(log_emissions[k])) shared.is_invalid = 1;
    const Number emission = column == last_column ? Number{1.0f, 0} : exp_of(log_emissions[k]);
    shared.emission_mantissas[i][row] = emission.mantissa;
    shared.emission_exponents[i][row] = emission.exponent;
  }
}

// Step 1 for the slots [first_row, first_row + kRows): each warp writes its share of the sums to shared memory.
template <class Element, int kRowsPerLane>
SA_DEVICE void add_products(const View<Element>& view, const DeviceColumns& columns, int64_t panel, int64_t width,
                            int64_t first_row, SweepShared<kRowsPerLane>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  float sum[kRowsPerLane][kPanel];
  int32_t peak[kRowsPerLane];
  bool is_faint[kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int64_t row = first_row + i * kWarp + lane;
    // beyond the last slot larger than any number
    peak[i] = row < columns.rows ? shared.peaks[i * kWarp + lane] : kMaxExponent;
    is_faint[i] = false;
#pragma unroll
    for (int column = 0; column < kPanel; ++column) sum[i][column] = 0.0f;
  }
  const bool along_dests = view.dest_stride == 1;
  const int fast = lane % kPanel, slow = lane / kPanel;
  const int64_t slow_stride = 2 * (along_dests ? view.source_stride : view.dest_stride);
  EdgeFlags flags;
  for (int64_t source = warp * kPanel; source < panel; source += kWarps * kPanel) {
    const Steps steps = Steps::between(view.shape, source, source + kPanel, panel, panel + width);
    if (at_most(steps.end, first_row + kWarp * kRowsPerLane) <= at_least(steps.first, first_row)) continue;
    // the lanes of half a warp read neighbours in memory: destinations forwards, sources backwards
    const Element* from = view.edge(source + (along_dests ? slow : fast), panel + (along_dests ? fast : slow));
    float log_edges[kPanel / 2];
#pragma unroll
    for (int i = 0; i < kPanel / 2; ++i) {
      log_edges[i] = (along_dests ? fast : slow + 2 * i) < width ? to_float(from[i * slow_stride]) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kPanel / 2; ++i) {
      float* to = along_dests ? &shared.edges[warp][slow + 2 * i][fast] : &shared.edges[warp][fast][slow + 2 * i];
      *to = linear_edge(log_edges[i], flags);
    }
    __syncwarp();
    bool is_live[kRowsPerLane];  // the same for all lanes
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int64_t first = first_row + i * kWarp;
      is_live[i] = at_most(steps.end, first + kWarp) > at_least(steps.first, first);
    }
    // a lane beyond the last slot reads the next column, or the peaks after the last one, and its result is not used
    const float* mantissa = columns.mantissa + source * columns.rows + first_row + lane;
    const int32_t* exponent = columns.exponent + source * columns.rows + first_row + lane;
    for (int first = 0; first < kPanel; first += kBatch) {
      Number alpha[kRowsPerLane][kBatch];  // all loads of a batch before their first use
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) alpha[i][k] = {mantissa[i * kWarp], exponent[i * kWarp]};
        mantissa += columns.rows;
        exponent += columns.rows;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        Quad edges[kQuads];
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          edges[quad] = reinterpret_cast<const Quad*>(shared.edges[warp][first + k])[quad];
        }
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
          if (!is_live[i]) continue;
          const int32_t below_peak = alpha[i][k].exponent - peak[i];
          is_faint[i] |= is_faint_exponent(below_peak);
          const float value = alpha[i][k].mantissa * pow2(below_peak);
#pragma unroll
          for (int column = 0; column < kPanel; ++column) {
            sum[i][column] += value * edges[column / 4].values[column % 4];
          }
        }
      }
    }
    __syncwarp();
  }
  flags.publish(shared);
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    if (is_faint[i]) shared.is_faint_row[i * kWarp + lane] = 1;
#pragma unroll
    for (int column = 0; column < kPanel; ++column) shared.sums[warp][column][i * kWarp + lane] = sum[i][column];
  }
}

// The sums of all warps, in the place of those of the first warp.
template <int kRowsPerLane>
SA_DEVICE void add_warps(SweepShared<kRowsPerLane>& shared) {
  constexpr int kRows = SweepShared<kRowsPerLane>::kRows;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPanel; i += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += shared.sums[warp][i / kRows][i % kRows];
    shared.sums[0][i / kRows][i % kRows] = sum;
  }
}

// Step 2 for the same slots.
template <class Element, int kRowsPerLane>
SA_DEVICE void solve_panel(const View<Element>& view, const DeviceColumns& columns, int64_t panel, int64_t width,
                           int64_t first_row, SweepShared<kRowsPerLane>& shared) {
  using F = Format<float>;
  constexpr int kRows = SweepShared<kRowsPerLane>::kRows;
  const int thread = static_cast<int>(threadIdx.x);
  const int rows = static_cast<int>(columns.rows), step = static_cast<int>(first_row) + thread;
  const int64_t last_column = view.shape.states - 1;
  const bool is_active = thread < kRows && step < rows;
  static_assert(kRows < kThreads, "one thread is left to bring what comes before the first slot");
  float sum[kPanel];
  Number emission[kPanel];
  int32_t scale = kDead, peak = kDead;  // sums are relative to 2^scale, peak is the largest source
  bool is_faint = false;
  if (is_active) {
    scale = peak = shared.peaks[thread];
    is_faint = shared.is_faint_row[thread] != 0;
#pragma unroll
    for (int i = 0; i < kPanel; ++i) {
      sum[i] = shared.sums[0][i][thread];
      emission[i] = {shared.emission_mantissas[i][thread], shared.emission_exponents[i][thread]};
    }
  }
  const bool has_faint_edge = shared.has_faint_edge != 0, has_steep_edge = shared.has_steep_edge != 0;
  float* mantissa = columns.mantissa + panel * rows + step + 1;
  int32_t* exponent = columns.exponent + panel * rows + step + 1;
#pragma unroll
  for (int i = 0; i < kPanel; ++i) {
    if (i >= width) break;
    const int64_t column = panel + i;
    if (is_active) {
      Number reach{sum[i], scale};
      const bool is_small = sum[i] < pow2(F::kLeastSum + peak - scale) && (is_faint || has_faint_edge);
      // other slots lie on no complete path, and products have skipped them
      const bool counts = Steps::into(view.shape, column).has(step);
      if (peak > kDead && counts && (is_small || has_steep_edge)) reach = exact_sum(view, columns, column, step);
      const Number alpha = normal(reach.mantissa * emission[i].mantissa, reach.exponent + emission[i].exponent);
      shared.passed[i & 1][thread + 1] = alpha;
      if (column == last_column) {
        // the likelihood stays at the step that reaches the end node
        columns.put(column, step, alpha);
      } else if (step + 1 < rows) {
        *mantissa = alpha.mantissa;
        *exponent = alpha.exponent;
      }
      mantissa += rows;
      exponent += rows;
    } else if (thread == kRows) {
      // a thread without a slot supplies the first one
      shared.passed[i & 1][0] = shared.before[i];
      if (first_row == 0 && column < last_column) columns.put(column, 0, shared.before[i]);
    }
    __syncthreads();
    if (is_active) {
      const Number source = shared.passed[i & 1][thread];
      if (source.exponent > scale + F::kWide) {
        const float factor = pow2(scale - source.exponent);
#pragma unroll
        for (int j = i + 1; j < kPanel; ++j) sum[j] *= factor;
        is_faint |= scale > kDead;
        scale = source.exponent;
      }
      const float value = source.mantissa * pow2(source.exponent - scale);
      is_faint |= is_faint_exponent(source.exponent - scale);
      peak = larger<ScalarLane<float>>(peak, source.exponent);
#pragma unroll
      for (int j = i + 1; j < kPanel; ++j) sum[j] += value * shared.panel_edges[i][j];
    }
  }
  if (is_active) shared.peaks[thread] = peak;
}

// Publishes that the slots of a panel are in memory, and whether this block or one before it met an invalid value.
SA_DEVICE void publish_panel(int32_t* progress, int32_t panel, bool is_invalid) {
  __threadfence();
  *const_cast<volatile int32_t*>(progress) = 2 * (panel + 1) + (is_invalid ? 1 : 0);
}

// Waits for the block before; returns whether it or one before it met an invalid value.
SA_DEVICE bool wait_for_panel(const int32_t* progress, int32_t panel) {
  int32_t value;
  do {
    value = *const_cast<const volatile int32_t*>(progress);
  } while (value < 2 * (panel + 1));
  __threadfence();
  return value % 2 == 1;
}

// One block for each group of slots of a sweep; sweep 0 of a sequence fills alpha and nll[b], sweep 1 beta.
//
// With several groups, blocks take the groups in the order in which they start, so that none waits for one that has
// not started; `tickets` counts them. All first groups come first, since they never wait. `tickets` and every sweep's
// `progress` are 0 before the launch.
//
// With one slot per lane two blocks share a multiprocessor, so that one works while the other waits; the registers
// for both cost a few spills. Three slots per lane need all registers.
template <class Element, int kRowsPerLane>
SA_KERNEL_PER_SM(kRowsPerLane == 1 ? 2 : 1)
void sweep_kernel(const states_alignment_batch batch, float* nll, int32_t* saved, int num_sweeps, int32_t* tickets) {
  using Shared = SweepShared<kRowsPerLane>;
  SA_SHARED_MEMORY(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  int64_t block = blockIdx.x;
  if (tickets != nullptr) {
    if (thread == 0) shared.ticket = atomicAdd(tickets, 1);
    __syncthreads();
    block = shared.ticket;
  }
  const int64_t sweep = block % (batch.batch * num_sweeps), b = sweep / num_sweeps;
  const int64_t first_row = block / (batch.batch * num_sweeps) * Shared::kRows;
  const bool is_forward = sweep % num_sweeps == 0;
  const Shape shape = shape_of(batch, b);
  if (!shape.has_path()) {
    if (is_forward && first_row == 0 && thread == 0) nll[b] = INFINITY;
    return;
  }
  const View<Element> view =
      view_of<Element>(batch, b, shape, is_forward ? Direction::kForward : Direction::kBackward);
  DeviceColumns columns = DeviceColumns::in(saved, sweep, batch);
  columns.rows = shape.rows(STATES_ALIGNMENT_ROW_PAD);
  if (first_row >= columns.rows) return;
  const bool is_last = first_row + Shared::kRows >= columns.rows;
  int32_t* progress = columns.progress + first_row / Shared::kRows;
  if (thread < Shared::kRows) shared.peaks[thread] = kDead;
  if (thread == 0) shared.is_invalid = 0;
  for (int64_t panel = 0; panel < shape.states; panel += kPanel) {
    const int64_t width = at_most(kPanel, shape.states - panel);
    if (thread == 0) shared.has_faint_edge = shared.has_steep_edge = 0;
    if (thread < Shared::kRows) shared.is_faint_row[thread] = 0;
    __syncthreads();
    if (thread < kPanel * kPanel) {
      const int v = thread / kPanel, u = thread % kPanel;
      EdgeFlags flags;
      const float log_edge = v < u && u < width ? to_float(*view.edge(panel + v, panel + u)) : -INFINITY;
      shared.panel_edges[v][u] = linear_edge(log_edge, flags);
      flags.publish(shared);
    }
    read_emissions(view, panel, first_row, shared);
    add_products(view, columns, panel, width, first_row, shared);
    if (first_row > 0 && thread == 0 && wait_for_panel(progress - 1, static_cast<int32_t>(panel / kPanel))) {
      shared.is_invalid = 1;
    }
    __syncthreads();
    add_warps(shared);
    if (thread < kPanel) {
      const int64_t column = panel + thread;
      // slot 0 is dead except at the start
      Number before = column == 0 ? Number{1.0f, 0} : zero();
      if (first_row > 0) before = column < shape.states - 1 ? columns.at(column, first_row) : zero();
      shared.before[thread] = before;
    }
    __syncthreads();
    solve_panel(view, columns, panel, width, first_row, shared);
    __syncthreads();
    if (!is_last && thread == 0) publish_panel(progress, static_cast<int32_t>(panel / kPanel), shared.is_invalid != 0);
  }
  if (is_forward && is_last && thread == 0) {
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
