/* The states-alignment loss of ExLM (arXiv 2501.13397, section 4.3, App. H and I): plain C interface.
 *
 * A DAG has nodes 0 .. S-1; every edge runs from a lower to a higher node. Paths start at node 0 and end at node S-1,
 * which emit nothing, and visit exactly T inner nodes between them; the t-th of these emits target t (t = 0 .. T-1):
 *
 *     alpha[0, 0] = 1
 *     alpha[t + 1, u] = exp(log_emit[t, u]) * sum over v < u of alpha[t, v] * exp(log_trans[v, u])    0 < u < S-1
 *     nll = -log(sum over v of alpha[T, v] * exp(log_trans[v, S - 1]))
 *
 * Index legend, used in every file of this folder:
 *     b         sequence of the batch              t  targets emitted so far, 0 .. T ("slot"); also the 0-based target
 *     v, u      source and destination of an edge  T, S  targets and nodes of one sequence, from its two lengths
 *
 * Entries beyond the lengths, columns 0 and S-1 of log_emit, and log_trans at and below the diagonal have no effect,
 * whatever they hold. (The host may load those of log_trans together with their neighbours.)
 * Log probabilities below -2^20 nats count as -inf. A NaN, or a value above 2^20 nats, that a path of T inner nodes
 * could read makes the nll of its sequence NaN. If no path exists (S - 2 < T, T = 0, or edges missing), the nll is
 * +inf and gradients are zero.
 *
 * No function throws, prints, keeps state or writes to arguments that are not outputs. Each returns a
 * states_alignment_status. Results are bitwise the same for any number of threads.
 */
#ifndef STATES_ALIGNMENT_H_
#define STATES_ALIGNMENT_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define STATES_ALIGNMENT_EXPORT __attribute__((visibility("default")))
#else
#define STATES_ALIGNMENT_EXPORT
#endif

/* Increased by one with every change of a signature, a struct, or the meaning of either. */
#define STATES_ALIGNMENT_ABI 3

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  STATES_ALIGNMENT_OK = 0,
  STATES_ALIGNMENT_BAD_DTYPE = 1,     /* not a states_alignment_dtype that this library takes */
  STATES_ALIGNMENT_BAD_SIZE = 2,      /* a size or a stride is negative, or too large for one launch */
  STATES_ALIGNMENT_OUT_OF_MEMORY = 3, /* no scratch memory for any thread */
  STATES_ALIGNMENT_BAD_ADDRESS = 4,   /* logits or bias are not aligned to 16 bytes */
  STATES_ALIGNMENT_CUDA_ERROR = 1000  /* plus the cudaError_t */
} states_alignment_status;

typedef enum {
  STATES_ALIGNMENT_FLOAT32 = 0,
  STATES_ALIGNMENT_FLOAT64 = 1, /* host only */
  STATES_ALIGNMENT_FLOAT16 = 2, /* device only; sums are float32 */
  STATES_ALIGNMENT_BFLOAT16 = 3 /* device only; sums are float32 */
} states_alignment_dtype;

/* A batch of DAGs. Strides count elements; the last axis of both tensors has stride 1. Lengths outside 0 .. max are
 * clamped. Pointers are host pointers for the host functions and device pointers for the device functions. */
typedef struct {
  const void* log_emit;          /* (batch, max_targets, max_states) */
  const void* log_trans;         /* (batch, max_states, max_states) */
  const int64_t* target_lengths; /* (batch,) T of each sequence */
  const int64_t* state_lengths;  /* (batch,) S of each sequence */
  int64_t batch;
  int64_t max_targets;
  int64_t max_states;
  int64_t emit_batch_stride;
  int64_t emit_row_stride;
  int64_t trans_batch_stride;
  int64_t trans_row_stride;
  int32_t dtype; /* states_alignment_dtype of both tensors */
} states_alignment_batch;

/* Logits of a block of rows, without their bias. Row r begins at `r * row_stride`; entries from `vocab` on have no effect.
 * Pointers are device pointers; logits and bias are aligned to 16 bytes, and so is every row. */
typedef struct {
  const void* logits;  /* (rows, row_stride) */
  const float* bias;   /* (vocab,) */
  int64_t rows;
  int64_t vocab;
  int64_t row_stride;  /* at least vocab */
  int64_t num_tokens;  /* tokens to score in each row */
  int32_t dtype;       /* states_alignment_dtype of the logits */
} states_alignment_logits;

/* Slots of a node are padded to a multiple of this; sizes of saved blocks then depend on the shapes alone. */
#define STATES_ALIGNMENT_ROW_PAD 16

STATES_ALIGNMENT_EXPORT int32_t states_alignment_abi(void);
STATES_ALIGNMENT_EXPORT const char* states_alignment_message(int32_t status);

/* Host. All arrays are contiguous and in the dtype of the batch.
 *
 * forward:   writes nll (batch,), and alpha for `backward` to `saved` unless that is null: batch *
 *            states_alignment_saved_words_cpu(max_targets, max_states) words of the size of the dtype.
 * backward:  from the same batch, `saved` and grad_nll (batch,), writes every element of grad_emit
 *            (batch, max_targets, max_states) and grad_trans (batch, max_states, max_states); either may be null.
 * best:      writes nodes (batch, max_targets) int64: node of each target on the most probable path, -1 without a
 *            path. Of paths of equal probability it takes the one whose last differing node is lowest. */
STATES_ALIGNMENT_EXPORT int64_t states_alignment_saved_words_cpu(int64_t max_targets, int64_t max_states);
STATES_ALIGNMENT_EXPORT int32_t states_alignment_forward_cpu(const states_alignment_batch* batch, void* nll,
                                                             void* saved, int32_t num_threads);
STATES_ALIGNMENT_EXPORT int32_t states_alignment_backward_cpu(const states_alignment_batch* batch, const void* saved,
                                                              const void* grad_nll, void* grad_emit, void* grad_trans,
                                                              int32_t num_threads);
STATES_ALIGNMENT_EXPORT int32_t states_alignment_best_cpu(const states_alignment_batch* batch, int64_t* nodes,
                                                          int32_t num_threads);

/* Device. The same with device pointers, enqueued on `stream` (a cudaStream_t) of `device`; nothing is allocated and
 * nothing waits. All sums are float32; nll and grad_nll are float32; gradients have the dtype of the batch.
 *
 * check:     returns STATES_ALIGNMENT_OK if the library runs on a device: driver new enough, architecture included.
 * forward:   always needs and writes `saved`: batch * num_sweeps * (2 * max_states + 1) *
 *            round_up(max_targets + 1, STATES_ALIGNMENT_ROW_PAD) words of 4 bytes. num_sweeps is 1, or 2 if
 *            `backward` follows: alpha and beta are then summed side by side.
 * best:      `scratch` has batch * max_states * round_up(max_targets + 1, STATES_ALIGNMENT_ROW_PAD) * 12 bytes, aligned
 *            to 8. */
STATES_ALIGNMENT_EXPORT int32_t states_alignment_check_cuda(int32_t device);
STATES_ALIGNMENT_EXPORT int32_t states_alignment_forward_cuda(const states_alignment_batch* batch, float* nll,
                                                              void* saved, int32_t num_sweeps, int32_t device,
                                                              void* stream);
STATES_ALIGNMENT_EXPORT int32_t states_alignment_backward_cuda(const states_alignment_batch* batch, void* saved,
                                                               const float* grad_nll, void* grad_emit,
                                                               void* grad_trans, int32_t device, void* stream);
STATES_ALIGNMENT_EXPORT int32_t states_alignment_best_cuda(const states_alignment_batch* batch, void* scratch,
                                                           int64_t* nodes, int32_t device, void* stream);

/* Device: the log-probabilities that the alignment reads, from logits. Enqueued as above. Tokens, log_probs and grad are
 * (rows, num_tokens); tokens are 0 or more, below `vocab`, and may repeat in a row. They are checked only by a build
 * without NDEBUG, which traps.
 *
 * token_log_probs:  writes log_sums (rows,), the log-sum-exp of each row, and the log_probs of its tokens.
 * logit_gradient:   from the same logits and tokens, the results of token_log_probs and the gradient `grad` of
 *                   log_probs, writes the gradient of the logits, in their layout and dtype; 0 from `vocab` on. It may
 *                   be written over the logits. */
STATES_ALIGNMENT_EXPORT int32_t states_alignment_token_log_probs_cuda(const states_alignment_logits* batch,
                                                                      const int64_t* tokens, float* log_sums,
                                                                      float* log_probs, int32_t device, void* stream);
STATES_ALIGNMENT_EXPORT int32_t states_alignment_logit_gradient_cuda(const states_alignment_logits* batch,
                                                                     const int64_t* tokens, const float* log_sums,
                                                                     const float* log_probs, const float* grad,
                                                                     void* gradient, int32_t device, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* STATES_ALIGNMENT_H_ */
