// The LM head on the device, for a block of rows of logits: log-probabilities of a few tokens of each row, and the
// gradient of the logits. Each kernel reads the logits once, 16 bytes a thread, and the second one writes them once.
// A build without NDEBUG traps where a token is outside the vocabulary.
#ifndef STATES_ALIGNMENT_TOKEN_LOG_PROBS_CUDA_CUH_
#define STATES_ALIGNMENT_TOKEN_LOG_PROBS_CUDA_CUH_

#include <assert.h>

#include "device.cuh"

namespace states_alignment {

// Logits of neighbouring tokens that are read and written together.
template <class Element>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(Element);
  Element values[kSize];
};

// Logits plus bias of the tokens `first` to `first + kSize`; -inf beyond the vocabulary.
template <class Element>
SA_DEVICE void read_logits(const Element* row, const float* bias, int64_t first, int64_t vocab,
                           float (&logits)[Pack<Element>::kSize]) {
  constexpr int kSize = Pack<Element>::kSize;
  const Pack<Element> pack = *reinterpret_cast<const Pack<Element>*>(row + first);
  if (first + kSize <= vocab) {
#pragma unroll
    for (int quad = 0; quad < kSize / 4; ++quad) {
      const Quad biases = reinterpret_cast<const Quad*>(bias + first)[quad];
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[4 * quad + i] = to_float(pack.values[4 * quad + i]) + biases.values[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      logits[i] = first + i < vocab ? to_float(pack.values[i]) + bias[first + i] : -INFINITY;
    }
  }
}

// A sum of exponentials relative to exp(peak).
struct ExpSum {
  float peak = -INFINITY;
  float sum = 0.0f;

  SA_DEVICE void add(float other_peak, float other_sum) {
    if (other_peak > peak) {
      sum *= expf(peak - other_peak);
      peak = other_peak;
    }
    // without a peak there is nothing to add, but a NaN must spread
    sum += other_peak == -INFINITY ? other_sum : other_sum * expf(other_peak - peak);
  }
};

struct LogProbsShared {
  float peaks[kThreads];
  float sums[kThreads];
};

// Block r: the log-sum-exp of row r, and log-probabilities of its tokens.
template <class Element>
SA_KERNEL void token_log_probs_kernel(const states_alignment_logits batch, const int64_t* tokens, float* log_sums,
                                      float* log_probs) {
  constexpr int kSize = Pack<Element>::kSize;
  SA_SHARED_MEMORY(memory);
  LogProbsShared& shared = *reinterpret_cast<LogProbsShared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t r = blockIdx.x, T = batch.num_tokens;
  const Element* row = static_cast<const Element*>(batch.logits) + r * batch.row_stride;
  ExpSum total;
  for (int64_t first = thread * kSize; first < batch.vocab; first += kThreads * kSize) {
    float logits[kSize];
    read_logits(row, batch.bias, first, batch.vocab, logits);
    float peak = logits[0], sum = 0.0f;
#pragma unroll
    for (int i = 1; i < kSize; ++i) peak = logits[i] > peak ? logits[i] : peak;
    const float shift = peak == -INFINITY ? 0.0f : peak;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += expf(logits[i] - shift);
    total.add(peak, sum);
  }
  shared.peaks[thread] = total.peak;
  shared.sums[thread] = total.sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      total.add(shared.peaks[thread + half], shared.sums[thread + half]);
      shared.peaks[thread] = total.peak;
      shared.sums[thread] = total.sum;
    }
  }
  __syncthreads();
  const float log_sum = shared.peaks[0] + logf(shared.sums[0]);
  if (thread == 0) log_sums[r] = log_sum;
  for (int64_t t = thread; t < T; t += kThreads) {
    const int64_t token = tokens[r * T + t];
    assert(0 <= token && token < batch.vocab);
    log_probs[r * T + t] = to_float(row[token]) + batch.bias[token] - log_sum;
  }
}

// Block r: d/dlogits of the sum over t of grad[r, t] * log_probs[r, t], which is grad at the tokens minus the softmax
// times the sum of grad. `gradient` has the layout of the logits and may be the same memory; 0 beyond the vocabulary.
template <class Element>
SA_KERNEL void logit_gradient_kernel(const states_alignment_logits batch, const int64_t* tokens, const float* log_sums,
                                     const float* log_probs, const float* grad, Element* gradient) {
  constexpr int kSize = Pack<Element>::kSize;
  SA_SHARED_MEMORY(memory);
  float* partial = reinterpret_cast<float*>(memory);  // one of each thread
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t r = blockIdx.x, T = batch.num_tokens;
  const Element* row = static_cast<const Element*>(batch.logits) + r * batch.row_stride;
  tokens += r * T;
  log_probs += r * T;
  grad += r * T;
  gradient += r * batch.row_stride;
  float sum = 0.0f;
  for (int64_t t = thread; t < T; t += kThreads) sum += grad[t];
  partial[thread] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) partial[thread] = sum += partial[thread + half];
  }
  __syncthreads();
  sum = partial[0];
  const float log_sum = log_sums[r];
  for (int64_t first = thread * kSize; first < batch.row_stride; first += kThreads * kSize) {
    float logits[kSize];
    read_logits(row, batch.bias, first, batch.vocab, logits);
    Pack<Element> pack;
#pragma unroll
    for (int i = 0; i < kSize; ++i) store(&pack.values[i], -expf(logits[i] - log_sum) * sum);
    *reinterpret_cast<Pack<Element>*>(gradient + first) = pack;
  }
  __syncthreads();
  for (int64_t t = thread; t < T; t += kThreads) {
    assert(0 <= tokens[t] && tokens[t] < batch.vocab);
    float value = -expf(log_probs[t]) * sum;
    // a token that occurs twice: both threads write the same sum
    for (int64_t other = 0; other < T; ++other) value += tokens[other] == tokens[t] ? grad[other] : 0.0f;
    store(&gradient[tokens[t]], value);
  }
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_TOKEN_LOG_PROBS_CUDA_CUH_
