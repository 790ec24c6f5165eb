"""Log-probabilities of a few tokens per state, without keeping a (rows, vocabulary) matrix.

The states-alignment loss reads T of the V probabilities of each state. They are computed one block of rows at a time.
Those of up to `chunk_rows` rows are kept for the backward pass, which computes the others again; so at most
2 * chunk_rows * V numbers are in memory, not N * V, and under autocast the 16-bit product of one block. On a CPU a
block fits into the cache. Axes: N rows, D width, V vocabulary, T tokens to score in each row.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from exlm_cli.ops import emissions_cuda
from exlm_cli.ops.precision import matmul_dtype, without_autocast

_CPU_BLOCK_ELEMENTS = 1 << 20
"""Log-probabilities of a block on a CPU, 4 MiB: half or twice the size is no faster, a whole chunk half as fast."""


class TokenStatistics(NamedTuple):
    """Entropy and most likely token of each row's distribution, float32."""

    entropy_nats: Float[Tensor, " N"]
    best_token: Int64[Tensor, " N"]
    best_log_prob: Float[Tensor, " N"]


def token_log_probs(
    hidden_ND: Float[Tensor, "N D"],
    weight_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"],
    token_ids_NT: Int64[Tensor, "N T"],
    *,
    chunk_rows: int,
) -> Float[Tensor, "N T"]:
    """Return log softmax(hidden weight' + bias) at T tokens of each row; float32 (float64 for float64 inputs).

    Under autocast the product runs in autocast's dtype and everything after it in float32. Differentiable once.

    Args:
        hidden_ND: States.
        weight_VD: Decoder, tied to the embedding.
        bias_V: Decoder bias.
        token_ids_NT: Tokens to score; may repeat.
        chunk_rows: Most rows of log-probabilities in memory; within this limit they are kept for the backward pass.
    """
    dtype = matmul_dtype(hidden_ND)
    with without_autocast(hidden_ND):
        is_trained = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
        result: Tensor
        if hidden_ND.device.type == "cuda":
            return emissions_cuda.token_log_probs(
                hidden_ND, weight_VD, bias_V, token_ids_NT, chunk_rows, dtype, is_trained
            )
        result, _ = _forward(hidden_ND, weight_VD, bias_V, token_ids_NT, chunk_rows, dtype, is_trained)
    return result


def token_statistics(
    hidden_ND: Float[Tensor, "N D"], weight_VD: Float[Tensor, "V D"], bias_V: Float[Tensor, " V"], *, chunk_rows: int
) -> TokenStatistics:
    """Return entropy (nats), most likely token and its log-probability of every row; not differentiable.

    Logits are float32 also under autocast: bfloat16 would merge near-equal logits and shift the entropy.
    """
    parts: list[TokenStatistics] = []
    with torch.no_grad(), without_autocast(hidden_ND):
        hidden_ND, weight_VD, bias_V = hidden_ND.float(), weight_VD.float(), bias_V.float()
        for rows in _chunks(len(hidden_ND), chunk_rows):
            log_probs = torch.addmm(bias_V, hidden_ND[rows], weight_VD.t()).log_softmax(-1)
            best = log_probs.max(-1)
            # xlogy(p, p) is p log p with 0 at p = 0, where exp(log p) * log p would be 0 * -inf
            entropy = -torch.xlogy(probs := log_probs.exp(), probs).sum(-1)
            parts.append(TokenStatistics(entropy, best.indices, best.values))
    if not parts:
        empty = hidden_ND.new_empty(0, dtype=torch.float32)
        return TokenStatistics(empty, empty.long(), empty)
    return TokenStatistics(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, chunk_rows):
        yield slice(start, min(start + chunk_rows, num_rows))


@torch.library.custom_op("exlm::token_log_probs", mutates_args=())
def _forward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    token_ids_NT: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
    is_trained: bool,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the tokens, and those of all tokens in the first rows for the backward pass.

    An operator of its own, since `torch.compile` would unroll the loop and compile again for each number of blocks.
    """
    result_NT, kept_KV = _empty_results(hidden_ND, weight_VD, token_ids_NT, chunk_rows, is_trained)
    weight_DV = weight_VD.to(product_dtype).t()
    block_rows = _block_rows(hidden_ND, weight_VD, chunk_rows)
    block_2RV = _empty_blocks(block_rows, len(kept_KV), hidden_ND, weight_VD, result_NT.dtype)
    for rows in _chunks(len(hidden_ND), block_rows):
        out = kept_KV[rows] if rows.stop <= len(kept_KV) else None
        log_probs = _log_probs(hidden_ND[rows].to(product_dtype), weight_DV, bias_V, block_2RV, out)
        result_NT[rows] = log_probs.gather(1, token_ids_NT[rows])
    return result_NT, kept_KV


@torch.library.custom_op("exlm::token_log_probs_backward", mutates_args=())
def _backward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    token_ids_NT: Tensor,
    kept_KV: Tensor,
    grad_NT: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight_VD.to(product_dtype)
    grad_hidden_ND = torch.empty_like(hidden_ND)
    grad_weight_VD = torch.zeros_like(weight_VD)
    grad_bias_V = torch.zeros_like(bias_V)
    block_rows = _block_rows(hidden_ND, weight_VD, chunk_rows)
    block_2RV = _empty_blocks(block_rows, len(kept_KV), hidden_ND, weight_VD, grad_NT.dtype)
    for rows in _chunks(len(hidden_ND), block_rows):
        hidden = hidden_ND[rows].to(product_dtype)
        if rows.stop <= len(kept_KV):
            probs = torch.exp(kept_KV[rows], out=block_2RV[-1, : len(hidden)])
        else:
            probs = _log_probs(hidden, weight.t(), bias_V, block_2RV).exp_()
        # d/dlogits of sum_t g_t log p_t: g at the tokens, minus the softmax times sum_t g_t
        grad_logits = probs.mul_(-grad_NT[rows].sum(1, keepdim=True))
        grad_logits.scatter_add_(1, token_ids_NT[rows], grad_NT[rows])
        grad_bias_V += grad_logits.sum(0)
        grad_logits = grad_logits.to(product_dtype)
        grad_hidden_ND[rows] = (grad_logits @ weight).to(hidden_ND.dtype)
        if product_dtype == weight_VD.dtype:
            # no second matrix; torch's counter of FLOPs does not know `addmm_`
            torch.addmm(grad_weight_VD, grad_logits.t(), hidden, out=grad_weight_VD)
        else:
            grad_weight_VD += (grad_logits.t() @ hidden).to(weight_VD.dtype)
    return grad_hidden_ND, grad_weight_VD, grad_bias_V


def _block_rows(hidden_ND: Tensor, weight_VD: Tensor, chunk_rows: int) -> int:
    # with fewer than D rows, reading the weights would cost more than reading the block
    return min(chunk_rows, max(hidden_ND.shape[1], _CPU_BLOCK_ELEMENTS // len(weight_VD)))


def _empty_results(
    hidden_ND: Tensor, weight_VD: Tensor, token_ids_NT: Tensor, chunk_rows: int, is_trained: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    num_rows, vocab_size = hidden_ND.shape[0], weight_VD.shape[0]  # symbols while torch.compile traces
    if not is_trained:
        num_kept = 0
    elif num_rows <= chunk_rows:
        num_kept = num_rows
    else:
        # the number of whole blocks that leaves room for the current one
        block_rows = _block_rows(hidden_ND, weight_VD, chunk_rows)
        num_kept = (chunk_rows - block_rows) // block_rows * block_rows
    return (
        hidden_ND.new_empty(token_ids_NT.shape, dtype=dtype),
        hidden_ND.new_empty((num_kept, vocab_size), dtype=dtype),
    )


# results for tensors without data, while torch.compile traces
_forward.register_fake(
    lambda hidden, weight, _, ids, chunk, __, trained: _empty_results(hidden, weight, ids, chunk, trained)
)
_backward.register_fake(lambda *inputs: tuple(torch.empty_like(tensor) for tensor in inputs[:3]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk_rows, ctx.product_dtype, _ = inputs
    ctx.set_materialize_grads(False)  # what is kept has no gradient: do not allocate zeros for it
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, grad_NT: Tensor | None, _grad_kept: None) -> tuple[Tensor | None, ...]:
    if grad_NT is None:
        return (None,) * 7
    return (*_backward(*ctx.saved_tensors, grad_NT, ctx.chunk_rows, ctx.product_dtype), None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_keep)


def _empty_blocks(
    block_rows: int, num_kept: int, hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype
) -> Float[Tensor, "blocks R V"]:
    """Return memory for the logits and log-probabilities of a block; for the logits alone where all rows are kept.

    All blocks share it: fresh memory of that size costs page faults, on a CPU a tenth of the time of this file.
    """
    num_rows = len(hidden_ND)
    num_blocks = 1 if num_kept == num_rows else 2
    return hidden_ND.new_empty((num_blocks, min(block_rows, num_rows), len(weight_VD)), dtype=dtype)


def _log_probs(
    hidden_ND: Tensor, weight_DV: Tensor, bias_V: Tensor, block_2RV: Tensor, out_NV: Tensor | None = None
) -> Tensor:
    """Return the log-probabilities of at most R rows, in `out_NV` or in the second block."""
    logits = block_2RV[0, : len(hidden_ND)]
    if hidden_ND.dtype == bias_V.dtype == logits.dtype:
        torch.addmm(bias_V, hidden_ND, weight_DV, out=logits)
    else:
        # the product is in 16 bits, the bias is added in the block's dtype
        torch.add(hidden_ND @ weight_DV, bias_V, out=logits)
    return torch.log_softmax(logits, -1, out=block_2RV[1, : len(hidden_ND)] if out_NV is None else out_NV)
