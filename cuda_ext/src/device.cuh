// Shared by all device kernels: the view of a batch and of the memory that holds the columns of both sweeps.
//
// With nvcc this is CUDA; tests/simt.h defines the same names for g++, so that the kernels also run, thread by thread,
// on a machine without a GPU. Kernels therefore use only blocks, shared memory and barriers.
#ifndef STATES_ALIGNMENT_DEVICE_CUH_
#define STATES_ALIGNMENT_DEVICE_CUH_

#include <math.h>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define SA_KERNEL __global__ __launch_bounds__(256)
#define SA_KERNEL_PER_SM(blocks) __global__ __launch_bounds__(256, blocks)  // at least this many at once
#define SA_DEVICE __device__ __forceinline__
#define SA_DEVICE_NOINLINE __device__ __noinline__
#define SA_SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#define SA_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(__VA_ARGS__)
#endif

#include "../include/states_alignment.h"
#include "element.h"
#include "lattice.h"

namespace states_alignment {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// Four floats that are read and written together.
struct alignas(16) Quad {
  float values[4];
};

using Number = Scaled<ScalarLane<float>>;

SA_HOST_DEVICE Number zero() { return {0.0f, kDead}; }
SA_HOST_DEVICE Number normal(float value, int32_t exponent) {
  return normalized<ScalarLane<float>>(value, exponent);
}
SA_HOST_DEVICE float pow2(int32_t n) { return power_of_two<ScalarLane<float>>(n); }
SA_HOST_DEVICE Number exp_of(float x) { return scaled_exp<ScalarLane<float>>(x); }

SA_HOST_DEVICE Shape shape_of(const states_alignment_batch& batch, int64_t b) {
  return {at_most(at_least(batch.target_lengths[b], 0), batch.max_targets),
          at_most(at_least(batch.state_lengths[b], 0), batch.max_states)};
}

template <class Element>
SA_HOST_DEVICE View<Element> view_of(const states_alignment_batch& batch, int64_t b, Shape shape, Direction direction) {
  return View<Element>::of(static_cast<const Element*>(batch.log_emit) + b * batch.emit_batch_stride,
                           batch.emit_row_stride,
                           static_cast<const Element*>(batch.log_trans) + b * batch.trans_batch_stride,
                           batch.trans_row_stride, shape, direction);
}

// The columns of one sweep in the saved block: mantissas, exponents, and the progress of each group of slots. After the
// progress of the first sweep, in the same row, comes the number of blocks that have started.
struct DeviceColumns {
  float* mantissa;
  int32_t* exponent;
  int32_t* progress;
  int64_t rows;

  SA_HOST_DEVICE static int64_t words(int64_t states, int64_t rows) { return (2 * states + 1) * rows; }
  SA_HOST_DEVICE static DeviceColumns in(int32_t* saved, int64_t sweep, const states_alignment_batch& batch) {
    const int64_t rows = round_up(batch.max_targets + 1, STATES_ALIGNMENT_ROW_PAD);
    int32_t* memory = saved + sweep * words(batch.max_states, rows);
    return {reinterpret_cast<float*>(memory), memory + batch.max_states * rows, memory + 2 * batch.max_states * rows,
            rows};
  }
  SA_HOST_DEVICE Number at(int64_t column, int64_t slot) const {
    return {mantissa[column * rows + slot], exponent[column * rows + slot]};
  }
  SA_HOST_DEVICE void put(int64_t column, int64_t slot, Number value) const {
    mantissa[column * rows + slot] = value.mantissa;
    exponent[column * rows + slot] = value.exponent;
  }
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_DEVICE_CUH_
