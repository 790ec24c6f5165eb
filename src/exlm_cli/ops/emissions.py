"""Log-probabilities of a few tokens per state, without keeping a (rows, vocabulary) matrix.

The states-alignment loss reads T of the V probabilities of each state. They are computed one block of rows at a time.
What the backward pass needs of the rows is kept for as many whole blocks as there is room for, and computed again for
the others. On CUDA what is kept are logits, and there is room in a share of the memory that is free: those that are
computed again have the same bits, so no result depends on it. Blocks have `chunk_rows` rows, whatever is free. The
logits have the dtype of the product, and their vocabulary is padded to a multiple of 64: with an odd number of columns
cuBLAS takes kernels that are several times slower. Everything else about a row is one pass over its logits, in the
kernels of `cuda_ext` or, where they cannot be built, in torch.

On a CPU a block fits into the cache, and the log-probabilities of `chunk_rows` rows are kept, with the block at work. A
CPU gains nothing by more: fresh memory costs as much as the product.

Axes: N rows, D width, V vocabulary, T tokens to score in each row; K rows that are kept, R rows of a block, P padded
vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from exlm_cli.ops import head_kernels
from exlm_cli.ops.alignment.native import device_kernels, device_obstacle
from exlm_cli.ops.head_kernels import LogitRows
from exlm_cli.ops.precision import matmul_dtype, without_autocast

_CPU_BLOCK_ELEMENTS = 1 << 20
"""Logits of a block on a CPU, 4 MiB: half or twice the size is no faster, a whole chunk half as fast."""
_KEPT_SHARE = 0.25
"""Of a device's free memory: the first step allocates gradients and moments, and each step gradients of states."""
_CUDA_VOCAB_MULTIPLE = 64
"""128 bytes of 16-bit logits: rows begin at whole cache lines, as the fastest kernels of cuBLAS want them."""


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
        token_ids_NT: Tokens to score, 0 to V - 1; may repeat. On CUDA they are not checked.
        chunk_rows: Rows of a block; on a CPU, rows that are kept or in a block.
    """
    dtype = matmul_dtype(hidden_ND)
    is_trained = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    num_kept = _num_kept(hidden_ND, weight_VD, chunk_rows, dtype) if is_trained else 0
    with without_autocast(hidden_ND):
        result: Tensor
        result, _, _ = _forward_op(hidden_ND, weight_VD, bias_V, token_ids_NT, chunk_rows, dtype, num_kept)
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
        for rows in _blocks(len(hidden_ND), chunk_rows):
            log_probs = torch.addmm(bias_V, hidden_ND[rows], weight_VD.t()).log_softmax(-1)
            best = log_probs.max(-1)
            # xlogy(p, p) is p log p with 0 at p = 0, where exp(log p) * log p would be 0 * -inf
            entropy = -torch.xlogy(probs := log_probs.exp(), probs).sum(-1)
            parts.append(TokenStatistics(entropy, best.indices, best.values))
    if not parts:
        empty = hidden_ND.new_empty(0, dtype=torch.float32)
        return TokenStatistics(empty, empty.long(), empty)
    return TokenStatistics(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class _Layout(NamedTuple):
    """Logits of a call on its device: rows of a block, padded vocabulary, dtype."""

    block_rows: int
    padded_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden_ND: Tensor, weight_VD: Tensor, chunk_rows: int, product_dtype: torch.dtype) -> "_Layout":
        vocab_size, width = weight_VD.shape
        if _is_on_device(hidden_ND):
            padded_size = (vocab_size + _CUDA_VOCAB_MULTIPLE - 1) // _CUDA_VOCAB_MULTIPLE * _CUDA_VOCAB_MULTIPLE
            return cls(chunk_rows, padded_size, product_dtype)
        # with fewer than D rows, reading the weights would cost more than reading the block
        block_rows = min(chunk_rows, max(width, _CPU_BLOCK_ELEMENTS // vocab_size))
        return cls(block_rows, vocab_size, _wide(hidden_ND))


def _num_kept(hidden_ND: Tensor, weight_VD: Tensor, chunk_rows: int, product_dtype: torch.dtype) -> int:
    """Return how many of the first rows are kept: all, or the whole blocks that leave room for the current one."""
    layout, num_rows = _Layout.of(hidden_ND, weight_VD, chunk_rows, product_dtype), len(hidden_ND)
    room = chunk_rows
    if _is_on_device(hidden_ND):
        row_bytes = layout.padded_size * layout.dtype.itemsize
        room = int(_KEPT_SHARE * _free_bytes(hidden_ND.device)) // row_bytes
    if num_rows <= room:
        return num_rows
    return max(0, room // layout.block_rows - 1) * layout.block_rows


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can allocate on a CUDA device."""
    free, _ = torch.cuda.mem_get_info(device)
    # not `memory_reserved` and `memory_allocated`, which sort all statistics: a millisecond of every microbatch
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    reserved, allocated = (statistics[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
    return int(free + reserved - allocated)


@torch.library.custom_op("exlm::token_log_probs", mutates_args=())
def _forward_op(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    token_ids_NT: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
    num_kept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the tokens, and for the backward pass what the first K rows need.

    Between them is the log-sum-exp of each row, on CUDA alone, where the kernels write and read it.

    An operator of its own: a user's `torch.compile` would unroll the loop, and compile again for each number of blocks.
    """
    results = _empty_results(hidden_ND, weight_VD, token_ids_NT, chunk_rows, product_dtype, num_kept)
    log_probs_NT, log_sums_N, kept_KP = results
    layout = _Layout.of(hidden_ND, weight_VD, chunk_rows, product_dtype)
    weight_PD = _padded(weight_VD.to(product_dtype), layout)
    bias_V, token_ids_NT = _aligned(bias_V, log_probs_NT.dtype), token_ids_NT.contiguous()
    num_rows = len(hidden_ND)
    # one memory for all blocks: fresh memory costs page faults, on a CPU a tenth of the time of this file
    block_RP = kept_KP.new_empty((0 if num_kept == num_rows else min(layout.block_rows, num_rows), layout.padded_size))
    for rows in _blocks(num_rows, layout.block_rows):
        out_RP = kept_KP[rows] if rows.stop <= num_kept else block_RP[: rows.stop - rows.start]
        logits_RP = _logits(hidden_ND[rows].to(product_dtype), weight_PD, bias_V, out_RP)
        _score(LogitRows(logits_RP, bias_V, token_ids_NT[rows]), log_sums_N[rows], log_probs_NT[rows])
    return results


@torch.library.custom_op("exlm::token_log_probs_backward", mutates_args=())
def _backward_op(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    token_ids_NT: Tensor,
    log_probs_NT: Tensor,
    log_sums_N: Tensor,
    kept_KP: Tensor,
    grad_NT: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _Layout.of(hidden_ND, weight_VD, chunk_rows, product_dtype)
    num_rows, vocab_size = len(hidden_ND), len(weight_VD)
    weight_PD = _padded(weight_VD.to(product_dtype), layout)
    grad_hidden_ND = torch.empty_like(hidden_ND)
    grad_weight_VD, grad_bias_V = torch.zeros_like(weight_VD), torch.zeros_like(bias_V)
    bias_V, token_ids_NT = _aligned(bias_V, log_probs_NT.dtype), token_ids_NT.contiguous()
    grad_NT = grad_NT.contiguous()
    block_RP = kept_KP.new_empty((min(layout.block_rows, num_rows), layout.padded_size))
    for rows in _blocks(num_rows, layout.block_rows):
        hidden_RD = hidden_ND[rows].to(product_dtype)
        grad_logits_RP = block_RP[: len(hidden_RD)]
        # what is kept stays as it is, for another backward pass
        is_kept = rows.stop <= len(kept_KP)
        logits_RP = kept_KP[rows] if is_kept else _logits(hidden_RD, weight_PD, bias_V, grad_logits_RP)
        of_rows = LogitRows(logits_RP, bias_V, token_ids_NT[rows])
        _differentiate_rows(of_rows, log_sums_N[rows], log_probs_NT[rows], grad_NT[rows], grad_logits_RP)
        grad_bias_V += grad_logits_RP.sum(0, dtype=log_probs_NT.dtype)[:vocab_size]
        grad_product_RP = grad_logits_RP.to(product_dtype)
        grad_hidden_ND[rows] = (grad_product_RP @ weight_PD).to(hidden_ND.dtype)
        if product_dtype == weight_VD.dtype and layout.padded_size == vocab_size:
            # no second matrix; torch's counter of FLOPs does not know `addmm_`
            torch.addmm(grad_weight_VD, grad_product_RP.t(), hidden_RD, out=grad_weight_VD)
        else:
            grad_weight_VD += (grad_product_RP.t() @ hidden_RD)[:vocab_size]
    return grad_hidden_ND, grad_weight_VD, grad_bias_V


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _has_kernels(logits: Tensor) -> bool:
    return _is_on_device(logits) and not device_obstacle(logits.dtype, logits.device)


def _wide(hidden_ND: Tensor) -> torch.dtype:
    """Return the dtype of the results, float32 or float64."""
    return torch.promote_types(hidden_ND.dtype, torch.float32)


def _blocks(num_rows: int, block_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, block_rows):
        yield slice(start, min(start + block_rows, num_rows))


def _padded(weight_VD: Tensor, layout: _Layout) -> Float[Tensor, "P D"]:
    """Return the decoder with rows of zeros up to the padded vocabulary."""
    missing = layout.padded_size - len(weight_VD)
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD


def _aligned(bias_V: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias in a dtype, at an address that the kernels can read 16 bytes at a time."""
    bias_V = bias_V.to(dtype).contiguous()
    return bias_V.clone() if bias_V.data_ptr() % 16 else bias_V


def _logits(hidden_RD: Tensor, weight_PD: Tensor, bias_V: Tensor, out_RP: Tensor) -> Tensor:
    """Fill the logits of a block; with their bias on a CPU, where it costs nothing, without it on CUDA."""
    if _is_on_device(out_RP):
        return torch.mm(hidden_RD, weight_PD.t(), out=out_RP)
    if hidden_RD.dtype == out_RP.dtype:
        return torch.addmm(bias_V, hidden_RD, weight_PD.t(), out=out_RP)
    # the product is in 16 bits, the bias is added in the block's dtype
    return torch.add(hidden_RD @ weight_PD.t(), bias_V, out=out_RP)


def _score(rows: LogitRows, log_sums_R: Tensor, log_probs_RT: Tensor) -> None:
    """Fill the log-probabilities of the tokens; in torch on a CPU, also turn the logits into log-probabilities."""
    if _has_kernels(rows.logits):
        head_kernels.token_log_probs(device_kernels(rows.logits.device), rows, log_sums_R, log_probs_RT)
        return
    logits_RV = _with_bias(rows)
    torch.log_softmax(logits_RV, -1, out=logits_RV)
    log_probs_RT.copy_(logits_RV.gather(1, rows.tokens))


def _differentiate_rows(
    rows: LogitRows, log_sums_R: Tensor, log_probs_RT: Tensor, grad_RT: Tensor, gradient_RP: Tensor
) -> None:
    """Fill the gradient of the logits: the gradient at the tokens, minus the softmax times its sum."""
    if _has_kernels(rows.logits):
        kernels = device_kernels(rows.logits.device)
        head_kernels.logit_gradient(kernels, rows, log_sums_R, log_probs_RT, grad_RT, gradient_RP)
        return
    logits_RV = _with_bias(rows)
    out_RV = gradient_RP if logits_RV is rows.logits else logits_RV
    # the softmax of log-probabilities is that of their logits
    probs_RV = torch.softmax(logits_RV, -1, out=out_RV)
    probs_RV.mul_(-grad_RT.sum(1, keepdim=True)).scatter_add_(1, rows.tokens, grad_RT)
    if out_RV is not gradient_RP:
        gradient_RP.zero_()[:, : len(rows.bias)] = out_RV


def _with_bias(rows: LogitRows) -> Float[Tensor, "R V"]:
    """Return logits with their bias: a copy on CUDA; on a CPU they have it."""
    return rows.logits[:, : len(rows.bias)] + rows.bias if _is_on_device(rows.logits) else rows.logits


def _empty_results(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    token_ids_NT: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
    num_kept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _Layout.of(hidden_ND, weight_VD, chunk_rows, product_dtype)
    num_rows = hidden_ND.shape[0]  # a symbol while torch.compile traces
    return (
        hidden_ND.new_empty(token_ids_NT.shape, dtype=_wide(hidden_ND)),
        hidden_ND.new_empty((num_rows if _is_on_device(hidden_ND) else 0,), dtype=_wide(hidden_ND)),
        hidden_ND.new_empty((num_kept, layout.padded_size), dtype=layout.dtype),
    )


# results for tensors without data, while torch.compile traces
_forward_op.register_fake(lambda hidden, weight, _, ids, *others: _empty_results(hidden, weight, ids, *others))
_backward_op.register_fake(lambda *inputs: tuple(torch.empty_like(tensor) for tensor in inputs[:3]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.chunk_rows, ctx.product_dtype, _ = inputs
    ctx.set_materialize_grads(False)  # the other results have no gradient: do not allocate zeros for them
    log_probs_NT, *others = output
    if not _is_on_device(log_probs_NT):
        log_probs_NT = log_probs_NT.new_empty(0)  # only the kernels read it again
    ctx.save_for_backward(*tensors, log_probs_NT, *others)


def _backward(ctx: Any, grad_NT: Tensor, _grad_log_sums: None, _grad_kept: None) -> tuple[Tensor | None, ...]:
    return (*_backward_op(*ctx.saved_tensors, grad_NT, ctx.chunk_rows, ctx.product_dtype), None, None, None, None)


_forward_op.register_autograd(_backward, setup_context=_setup_context)
