"""Log-probabilities of a few tokens per state, without keeping a (rows, vocabulary) matrix.

The states-alignment loss reads T of the V probabilities of each state. They are computed one block of rows at a time,
and beyond `chunk_rows` rows computed again in the backward pass, so the memory is chunk_rows * V, not N * V. On a CPU a
block fits into the cache. Axes: N rows, D width, V vocabulary, T tokens to score in each row.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    device_type = hidden_ND.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    matmul_dtype = torch.get_autocast_dtype(device_type) if is_autocast else hidden_ND.dtype
    with torch.autocast(device_type, enabled=False):
        # torch types the result of Function.apply as Any
        result: Tensor = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden_ND, weight_VD, bias_V, token_ids_NT, chunk_rows, matmul_dtype
        )
    return result


def token_statistics(
    hidden_ND: Float[Tensor, "N D"],
    weight_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"],
    *,
    chunk_rows: int,
) -> TokenStatistics:
    """Return entropy (nats), most likely token and its log-probability of every row; not differentiable.

    Logits are float32 also under autocast: bfloat16 would merge near-equal logits and shift the entropy.
    """
    parts: list[TokenStatistics] = []
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
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


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        token_ids_NT: Tensor,
        chunk_rows: int,
        matmul_dtype: torch.dtype,
    ) -> Tensor:
        num_rows = len(hidden_ND)
        out_dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight_DV = weight_VD.to(matmul_dtype).t()
        block_rows = chunk_rows
        if hidden_ND.device.type == "cpu":
            # with fewer than D rows, reading the weights would cost more than reading the block
            block_rows = min(chunk_rows, max(hidden_ND.shape[1], _CPU_BLOCK_ELEMENTS // len(weight_VD)))
        # all rows, or as many as leave room for the current block
        num_kept = num_rows if num_rows <= chunk_rows else chunk_rows - block_rows
        result_NT = torch.empty(token_ids_NT.shape, dtype=out_dtype, device=hidden_ND.device)
        kept: list[Tensor] = []
        for rows in _chunks(num_rows, block_rows):
            log_probs = _log_probs(hidden_ND[rows].to(matmul_dtype), weight_DV, bias_V, out_dtype)
            result_NT[rows] = log_probs.gather(1, token_ids_NT[rows])
            if rows.stop <= num_kept:
                kept.append(log_probs)
        ctx.block_rows, ctx.matmul_dtype = block_rows, matmul_dtype
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, token_ids_NT, *kept)
        return result_NT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NT: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, token_ids_NT, *kept = ctx.saved_tensors
        weight = weight_VD.to(ctx.matmul_dtype)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD)
        grad_bias_V = torch.zeros_like(bias_V)
        for block, rows in enumerate(_chunks(len(hidden_ND), ctx.block_rows)):
            hidden = hidden_ND[rows].to(ctx.matmul_dtype)
            if block < len(kept):
                probs = kept[block].exp()
            else:
                probs = _log_probs(hidden, weight.t(), bias_V, grad_NT.dtype).exp_()
            # d/dlogits of sum_t g_t log p_t: g at the tokens, minus the softmax times sum_t g_t
            grad_logits = probs.mul_(-grad_NT[rows].sum(1, keepdim=True))
            grad_logits.scatter_add_(1, token_ids_NT[rows], grad_NT[rows])
            grad_bias_V += grad_logits.sum(0)
            grad_logits = grad_logits.to(ctx.matmul_dtype)
            grad_hidden_ND[rows] = (grad_logits @ weight).to(hidden_ND.dtype)
            grad_weight_VD += (grad_logits.t() @ hidden).to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None, None


def _log_probs(hidden_ND: Tensor, weight_DV: Tensor, bias_V: Tensor, dtype: torch.dtype) -> Tensor:
    if hidden_ND.dtype == bias_V.dtype == dtype:
        return torch.addmm(bias_V, hidden_ND, weight_DV).log_softmax(-1)
    # the product is in 16 bits, the bias is added in `dtype`
    return ((hidden_ND @ weight_DV).to(dtype) + bias_V).log_softmax(-1)
