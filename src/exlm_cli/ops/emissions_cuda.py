"""Log-probabilities of a few tokens per state on CUDA: `emissions.token_log_probs` for tensors on a device.

The logits of a block of rows come from one matrix product, whose vocabulary is padded to a multiple of 64: with an odd
number of columns cuBLAS takes kernels that are several times slower. Everything else about a row is one pass over its
logits, in the kernels of `cuda_ext` or, where they cannot be built, in torch. Only the log-sum-exp of each row and the
logits of up to one block are kept. Axes: those of `emissions`, R rows of a block, P padded vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from exlm_cli.ops.alignment.library import LogitRows
from exlm_cli.ops.alignment.native import device_kernels, obstacle

_VOCAB_MULTIPLE = 64
"""128 bytes of 16-bit logits: rows begin at whole cache lines, as the fastest kernels of cuBLAS want them."""


def token_log_probs(
    hidden_ND: Float[Tensor, "N D"],
    weight_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"],
    token_ids_NT: Int64[Tensor, "N T"],
    chunk_rows: int,
    product_dtype: torch.dtype,
    is_trained: bool,
) -> Float[Tensor, "N T"]:
    """See `emissions.token_log_probs`.

    Args:
        hidden_ND, weight_VD, bias_V, token_ids_NT: As there.
        chunk_rows: Most rows of float32 log-probabilities that fit in memory twice; 16-bit logits take half as much.
        product_dtype: Of the product and of its gradient.
        is_trained: Keep what the backward pass needs.
    """
    result: Tensor
    result, _, _ = _forward(hidden_ND, weight_VD, bias_V, token_ids_NT, chunk_rows, product_dtype, is_trained)
    return result


@torch.library.custom_op("exlm::token_log_probs_cuda", mutates_args=())
def _forward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    token_ids_NT: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
    is_trained: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the tokens, the log-sum-exp of each row, and the logits if all are one block."""
    results = _empty_results(hidden_ND, weight_VD, token_ids_NT, chunk_rows, product_dtype, is_trained)
    log_probs_NT, log_sums_N, kept_KP = results
    weight_DP = _padded(weight_VD, product_dtype).t()
    bias_V, token_ids_NT = _aligned(bias_V, log_probs_NT.dtype), token_ids_NT.contiguous()
    for rows in _blocks(len(hidden_ND), chunk_rows, product_dtype):
        hidden_RD = hidden_ND[rows].to(product_dtype)
        logits_RP = torch.mm(hidden_RD, weight_DP, out=kept_KP) if len(kept_KP) else hidden_RD @ weight_DP
        of_rows = LogitRows(logits_RP, bias_V, token_ids_NT[rows])
        _score(of_rows, log_sums_N[rows], log_probs_NT[rows])
    return results


@torch.library.custom_op("exlm::token_log_probs_cuda_backward", mutates_args=())
def _backward(
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
    weight_PD = _padded(weight_VD, product_dtype)
    vocab_size = len(weight_VD)
    grad_hidden_ND = torch.empty_like(hidden_ND)
    grad_weight_VD, grad_bias_V = torch.zeros_like(weight_VD), torch.zeros_like(bias_V)
    bias_of_logits_V = _aligned(bias_V, log_probs_NT.dtype)
    token_ids_NT, grad_NT = token_ids_NT.contiguous(), grad_NT.contiguous()
    for rows in _blocks(len(hidden_ND), chunk_rows, product_dtype):
        hidden_RD = hidden_ND[rows].to(product_dtype)
        logits_RP = kept_KP if len(kept_KP) else hidden_RD @ weight_PD.t()
        # what is kept stays as it is, for another backward pass
        grad_logits_RP = torch.empty_like(logits_RP) if len(kept_KP) else logits_RP
        of_rows = LogitRows(logits_RP, bias_of_logits_V, token_ids_NT[rows])
        _differentiate_rows(of_rows, log_sums_N[rows], log_probs_NT[rows], grad_NT[rows], grad_logits_RP)
        grad_bias_V += grad_logits_RP.sum(0, dtype=log_probs_NT.dtype)[:vocab_size]
        grad_hidden_ND[rows] = (grad_logits_RP @ weight_PD).to(hidden_ND.dtype)
        grad_weight_VD += (grad_logits_RP.t() @ hidden_RD)[:vocab_size]
    return grad_hidden_ND, grad_weight_VD, grad_bias_V


def _padded(weight_VD: Tensor, dtype: torch.dtype) -> Float[Tensor, "P D"]:
    """Return the decoder in a dtype, with rows of zeros up to the next multiple."""
    return F.pad(weight_VD.to(dtype), (0, 0, 0, -len(weight_VD) % _VOCAB_MULTIPLE))


def _aligned(bias_V: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias in a dtype, at an address that the kernels can read 16 bytes at a time."""
    bias_V = bias_V.to(dtype).contiguous()
    return bias_V.clone() if bias_V.data_ptr() % 16 else bias_V


def _block_rows(chunk_rows: int, product_dtype: torch.dtype) -> int:
    return max(1, chunk_rows * torch.float32.itemsize // product_dtype.itemsize)


def _blocks(num_rows: int, chunk_rows: int, product_dtype: torch.dtype) -> list[slice]:
    size = _block_rows(chunk_rows, product_dtype)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _score(rows: LogitRows, log_sums_R: Tensor, log_probs_RT: Tensor) -> None:
    """Fill the log-sum-exp of each row and the log-probabilities of its tokens."""
    if _has_kernels(rows.logits):
        device_kernels(rows.logits.device).token_log_probs(rows, log_sums_R, log_probs_RT)
        return
    logits_RV = rows.logits[:, : len(rows.bias)] + rows.bias
    torch.logsumexp(logits_RV, 1, out=log_sums_R)
    torch.sub(logits_RV.gather(1, rows.tokens), log_sums_R[:, None], out=log_probs_RT)


def _differentiate_rows(
    rows: LogitRows, log_sums_R: Tensor, log_probs_RT: Tensor, grad_RT: Tensor, gradient_RP: Tensor
) -> None:
    """Fill the gradient of the logits: the gradient at the tokens, minus the softmax times its sum."""
    if _has_kernels(rows.logits):
        device_kernels(rows.logits.device).logit_gradient(rows, log_sums_R, log_probs_RT, grad_RT, gradient_RP)
        return
    vocab_size = len(rows.bias)
    probs_RV = (rows.logits[:, :vocab_size] + rows.bias).sub_(log_sums_R[:, None]).exp_()
    grad_RV = probs_RV.mul_(-grad_RT.sum(1, keepdim=True)).scatter_add_(1, rows.tokens, grad_RT)
    gradient_RP.zero_()[:, :vocab_size] = grad_RV


def _has_kernels(logits: Tensor) -> bool:
    return not obstacle(logits.dtype, logits.device)


def _empty_results(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    token_ids_NT: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
    is_trained: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    num_rows, vocab_size = hidden_ND.shape[0], weight_VD.shape[0]  # symbols while torch.compile traces
    num_kept = num_rows if is_trained and num_rows <= _block_rows(chunk_rows, product_dtype) else 0
    padded_size = (vocab_size + _VOCAB_MULTIPLE - 1) // _VOCAB_MULTIPLE * _VOCAB_MULTIPLE
    return (
        hidden_ND.new_empty(token_ids_NT.shape, dtype=dtype),
        hidden_ND.new_empty((num_rows,), dtype=dtype),
        hidden_ND.new_empty((num_kept, padded_size), dtype=product_dtype),
    )


# results for tensors without data, while torch.compile traces
_forward.register_fake(lambda hidden, weight, _, ids, *others: _empty_results(hidden, weight, ids, *others))
_backward.register_fake(lambda *inputs: tuple(torch.empty_like(tensor) for tensor in inputs[:3]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.chunk_rows, ctx.product_dtype, _ = inputs
    ctx.set_materialize_grads(False)  # the other results have no gradient: do not allocate zeros for them
    ctx.save_for_backward(*tensors, *output)


def _differentiate(
    ctx: Any, grad_NT: Tensor | None, _grad_log_sums: None, _grad_kept: None
) -> tuple[Tensor | None, ...]:
    if grad_NT is None:
        return (None,) * 7
    return (*_backward(*ctx.saved_tensors, grad_NT, ctx.chunk_rows, ctx.product_dtype), None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_keep)
