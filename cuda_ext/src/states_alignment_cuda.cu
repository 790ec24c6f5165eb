// Device entry points: check, choose a kernel by dtype and shape, launch. Nothing is allocated and nothing waits, so
// every call can be captured into a CUDA graph.
#include <type_traits>

#include "best_path_cuda.cuh"
#include "device.cuh"
#include "gradient_cuda.cuh"
#include "status.h"
#include "sweep_cuda.cuh"
#include "token_log_probs_cuda.cuh"

namespace states_alignment {
namespace {

constexpr int64_t kMaxBlocks = 2147483647;  // of one launch, along its first axis

int32_t status_of(cudaError_t error) {
  return error == cudaSuccess ? STATES_ALIGNMENT_OK : STATES_ALIGNMENT_CUDA_ERROR + static_cast<int32_t>(error);
}

int32_t launched() { return status_of(cudaGetLastError()); }

// Makes a device current while it lives, if it can.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device) {
      error_ = cudaSetDevice(device);
    } else {
      previous_ = -1;
    }
    if (error_ != cudaSuccess) cudaGetLastError();  // status() reports it; the next call must not
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  int32_t status() const { return status_of(error_); }

 private:
  int previous_ = -1;
  cudaError_t error_ = cudaSuccess;
};

template <class Element, int kRowsPerLane>
int32_t sweep(const states_alignment_batch& batch, float* nll, int32_t* saved, int num_sweeps, cudaStream_t stream) {
  const int bytes = static_cast<int>(sizeof(SweepShared<kRowsPerLane>));
  const auto kernel = sweep_kernel<Element, kRowsPerLane>;
  // more shared memory than the default of a kernel
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  const int64_t rows = round_up(batch.max_targets + 1, STATES_ALIGNMENT_ROW_PAD), sweeps = batch.batch * num_sweeps;
  const int64_t groups = (rows + SweepShared<kRowsPerLane>::kRows - 1) / SweepShared<kRowsPerLane>::kRows;
  if (sweeps * groups > kMaxBlocks) return STATES_ALIGNMENT_BAD_SIZE;
  int32_t* tickets = nullptr;
  if (groups > 1 && error == cudaSuccess) {
    // a row of slots is longer than its number of groups, so the counter after them is in it too
    int32_t* progress = DeviceColumns::in(saved, 0, batch).progress;
    const size_t pitch = static_cast<size_t>(DeviceColumns::words(batch.max_states, rows)) * sizeof(int32_t);
    error = cudaMemset2DAsync(progress, pitch, 0, static_cast<size_t>(groups + 1) * sizeof(int32_t),
                              static_cast<size_t>(sweeps), stream);
    tickets = progress + groups;
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    return status_of(error);
  }
  SA_LAUNCH(kernel, sweeps * groups, kThreads, bytes, stream, batch, nll, saved, num_sweeps, tickets);
  return launched();
}

template <class Element>
int32_t forward(const states_alignment_batch& batch, float* nll, int32_t* saved, int num_sweeps, cudaStream_t stream) {
  if (batch.batch == 0) return STATES_ALIGNMENT_OK;
  // three slots a lane hold the 77 targets of a text at once; one slot suffices for a molecule and saves registers
  return batch.max_targets < kWarp ? sweep<Element, 1>(batch, nll, saved, num_sweeps, stream)
                                   : sweep<Element, 3>(batch, nll, saved, num_sweeps, stream);
}

template <class Element>
int32_t backward(const states_alignment_batch& batch, int32_t* saved, const float* grad_nll, void* grad_emit,
                 void* grad_trans, cudaStream_t stream) {
  const int64_t tiles = round_up(batch.max_states, kTile) / kTile;
  const int64_t edge_blocks = batch.batch * tiles * tiles;
  const int64_t emission_blocks =
      batch.batch * (round_up(batch.max_targets, kWarp) / kWarp) * (round_up(batch.max_states, kWarp) / kWarp);
  if (edge_blocks > kMaxBlocks || emission_blocks > kMaxBlocks) return STATES_ALIGNMENT_BAD_SIZE;
  if (grad_trans != nullptr && edge_blocks > 0) {
    SA_LAUNCH(edge_gradient_kernel<Element>, edge_blocks, kThreads, sizeof(EdgeShared), stream, batch, saved, grad_nll,
              static_cast<Element*>(grad_trans));
  }
  if (grad_emit != nullptr && emission_blocks > 0) {
    SA_LAUNCH(emission_gradient_kernel<Element>, emission_blocks, kThreads, sizeof(EmissionShared), stream, batch,
              saved, grad_nll, static_cast<Element*>(grad_emit));
  }
  return launched();
}

template <class Element>
int32_t best(const states_alignment_batch& batch, void* scratch, int64_t* nodes, cudaStream_t stream) {
  if (batch.batch == 0) return STATES_ALIGNMENT_OK;
  const int64_t rows = round_up(batch.max_targets + 1, STATES_ALIGNMENT_ROW_PAD);
  double* scores = static_cast<double*>(scratch);
  int32_t* sources = reinterpret_cast<int32_t*>(scores + batch.batch * batch.max_states * rows);
  SA_LAUNCH(best_path_kernel<Element>, batch.batch, kThreads, 0, stream, batch, scores, sources, nodes);
  return launched();
}

template <class Element>
int32_t token_log_probs(const states_alignment_logits& batch, const int64_t* tokens, float* log_sums, float* log_probs,
                        cudaStream_t stream) {
  if (batch.rows == 0) return STATES_ALIGNMENT_OK;
  SA_LAUNCH(token_log_probs_kernel<Element>, batch.rows, kThreads, sizeof(LogProbsShared), stream, batch, tokens,
            log_sums, log_probs);
  return launched();
}

template <class Element>
int32_t logit_gradient(const states_alignment_logits& batch, const int64_t* tokens, const float* log_sums,
                       const float* log_probs, const float* grad, void* gradient, cudaStream_t stream) {
  if (batch.rows == 0) return STATES_ALIGNMENT_OK;
  SA_LAUNCH(logit_gradient_kernel<Element>, batch.rows, kThreads, kThreads * sizeof(float), stream, batch, tokens,
            log_sums, log_probs, grad, static_cast<Element*>(gradient));
  return launched();
}

int32_t checked(const states_alignment_batch& batch) {
  return has_negative_size(batch) || batch.batch > kMaxBlocks / 2 ? STATES_ALIGNMENT_BAD_SIZE : STATES_ALIGNMENT_OK;
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

int32_t checked(const states_alignment_logits& batch) {
  if (batch.rows < 0 || batch.rows > kMaxBlocks || batch.vocab < 1 || batch.row_stride < batch.vocab ||
      batch.row_stride % 8 != 0 || batch.num_tokens < 0) {
    return STATES_ALIGNMENT_BAD_SIZE;
  }
  return is_aligned(batch.logits) && is_aligned(batch.bias) ? STATES_ALIGNMENT_OK : STATES_ALIGNMENT_BAD_ADDRESS;
}

// Calls `run` with a null pointer to the type that the batch is stored in.
template <class Batch, class Run>
int32_t with_element(const Batch& batch, int32_t device, Run&& run) {
  if (const int32_t status = checked(batch); status != STATES_ALIGNMENT_OK) return status;
  const DeviceGuard guard(device);
  if (guard.status() != STATES_ALIGNMENT_OK) return guard.status();
  switch (batch.dtype) {
    case STATES_ALIGNMENT_FLOAT32:
      return run(static_cast<float*>(nullptr));
    case STATES_ALIGNMENT_FLOAT16:
      return run(static_cast<Float16*>(nullptr));
    case STATES_ALIGNMENT_BFLOAT16:
      return run(static_cast<Bfloat16*>(nullptr));
    default:
      return STATES_ALIGNMENT_BAD_DTYPE;
  }
}

template <class Pointer>
using ElementOf = std::remove_pointer_t<Pointer>;

}  // namespace
}  // namespace states_alignment

using namespace states_alignment;

int32_t states_alignment_abi(void) { return STATES_ALIGNMENT_ABI; }

const char* states_alignment_message(int32_t status) {
  return status < STATES_ALIGNMENT_CUDA_ERROR
             ? message_of(status)
             : cudaGetErrorString(static_cast<cudaError_t>(status - STATES_ALIGNMENT_CUDA_ERROR));
}

int32_t states_alignment_check_cuda(int32_t device) {
  const DeviceGuard guard(device);
  if (guard.status() != STATES_ALIGNMENT_OK) return guard.status();
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, sweep_kernel<float, 1>);
  cudaGetLastError();
  return status_of(error);
}

int32_t states_alignment_forward_cuda(const states_alignment_batch* batch, float* nll, void* saved, int32_t num_sweeps,
                                      int32_t device, void* stream) {
  return with_element(*batch, device, [&](auto* element) {
    return forward<ElementOf<decltype(element)>>(*batch, nll, static_cast<int32_t*>(saved), num_sweeps,
                                                 static_cast<cudaStream_t>(stream));
  });
}

int32_t states_alignment_backward_cuda(const states_alignment_batch* batch, void* saved, const float* grad_nll,
                                       void* grad_emit, void* grad_trans, int32_t device, void* stream) {
  return with_element(*batch, device, [&](auto* element) {
    return backward<ElementOf<decltype(element)>>(*batch, static_cast<int32_t*>(saved), grad_nll, grad_emit,
                                                  grad_trans, static_cast<cudaStream_t>(stream));
  });
}

int32_t states_alignment_best_cuda(const states_alignment_batch* batch, void* scratch, int64_t* nodes, int32_t device,
                                   void* stream) {
  return with_element(*batch, device, [&](auto* element) {
    return best<ElementOf<decltype(element)>>(*batch, scratch, nodes, static_cast<cudaStream_t>(stream));
  });
}

int32_t states_alignment_token_log_probs_cuda(const states_alignment_logits* batch, const int64_t* tokens,
                                              float* log_sums, float* log_probs, int32_t device, void* stream) {
  return with_element(*batch, device, [&](auto* element) {
    return token_log_probs<ElementOf<decltype(element)>>(*batch, tokens, log_sums, log_probs,
                                                         static_cast<cudaStream_t>(stream));
  });
}

int32_t states_alignment_logit_gradient_cuda(const states_alignment_logits* batch, const int64_t* tokens,
                                             const float* log_sums, const float* log_probs, const float* grad,
                                             void* gradient, int32_t device, void* stream) {
  return with_element(*batch, device, [&](auto* element) {
    return logit_gradient<ElementOf<decltype(element)>>(*batch, tokens, log_sums, log_probs, grad, gradient,
                                                        static_cast<cudaStream_t>(stream));
  });
}
