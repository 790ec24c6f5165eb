"""Tokens and their classes under an LM head: one row of logits a mask, however many states share it.

A token y belongs to class r with probability A[y, r], whatever the context. The class's share of the one distribution P
that the LM head gives for a mask is sum over y of P(y) A[y, r].

The logits are computed one block of rows at a time, and again in the backward pass: they cost little beside an encoder,
and much memory. Sums over the vocabulary are float32 (float64 for float64 inputs) also under autocast.

Axes: M masks, N of them in a block, D width, V vocabulary, R classes, k states of a mask.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from exlm_cli.ops.precision import matmul_dtype, without_autocast

_CPU_BLOCK_ELEMENTS = 1 << 20
"""Logits of a block on a CPU, 4 MiB, which stay in its cache."""


class LMHeadOutput(NamedTuple):
    """Inputs of a decoder: features (M, D), tied weight (V, D), bias (V,)."""

    features: Float[Tensor, "M D"]
    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"]


def class_shares(
    head: LMHeadOutput, membership_VR: Float[Tensor, "V R"], token_ids_M: Int64[Tensor, " M"], *, chunk_rows: int
) -> tuple[Float[Tensor, " M"], Float[Tensor, "M R"]]:
    """Return log P(y) of one token of each mask, and the classes' shares of P. Differentiable once.

    Args:
        head: Under autocast its product runs in autocast's dtype.
        membership_VR: A; positive, rows sum to 1.
        token_ids_M: Tokens to score.
        chunk_rows: The most rows of a block.
    """
    dtype = matmul_dtype(head.features)
    with without_autocast(head.features):
        result: tuple[Tensor, Tensor] = _ClassShares.apply(  # type: ignore[no-untyped-call]
            *head, membership_VR, token_ids_M, chunk_rows, dtype
        )
    return result


def state_entropies(
    head: LMHeadOutput, membership_VR: Float[Tensor, "V R"], states_MRk: Float[Tensor, "M R k"], *, chunk_rows: int
) -> Float[Tensor, "M k"]:
    """Return the entropies, nats, of the states that classes are sorted into; float32, not differentiable.

    Args:
        head: Its logits are float32 also under autocast.
        membership_VR: A.
        states_MRk: The states' shares of each class; rows sum to 1.
        chunk_rows: The most rows of a block.
    """
    num_states = states_MRk.shape[-1]
    entropy_Mk = states_MRk.new_empty((len(states_MRk), num_states))
    with torch.no_grad(), without_autocast(head.features):
        head = LMHeadOutput(*(tensor.float() for tensor in head))
        for rows in _blocks(head, max(1, chunk_rows // num_states), num_states):
            log_prob_NV = _logits(head, rows, torch.float32).log_softmax(-1)
            log_prob_NkV = log_prob_NV[:, None] + (states_MRk[rows].mT @ membership_VR.t()).log()
            log_prob_NkV = log_prob_NkV.log_softmax(-1)
            entropy_Mk[rows] = -torch.xlogy(prob_NkV := log_prob_NkV.exp(), prob_NkV).sum(-1)
    return entropy_Mk


class _ClassShares(torch.autograd.Function):
    """Keeps the log-sum-exp of each row of logits, and computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor,
        membership_VR: Tensor,
        token_ids_M: Tensor,
        chunk_rows: int,
        product_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        head = LMHeadOutput(features, weight.to(product_dtype), bias)
        wide = torch.promote_types(features.dtype, torch.float32)
        num_masks, num_classes = len(features), membership_VR.shape[1]
        log_prob_M, log_sum_M, share_MR = (
            torch.empty(shape, dtype=wide, device=features.device)
            for shape in ((num_masks,), (num_masks,), (num_masks, num_classes))
        )
        for rows in _blocks(head, chunk_rows):
            logits_NV = _logits(head, rows, wide)
            log_sum_M[rows] = log_sum_N = logits_NV.logsumexp(-1)
            log_prob_M[rows] = logits_NV.gather(1, token_ids_M[rows, None])[:, 0] - log_sum_N
            share_MR[rows] = logits_NV.sub_(log_sum_N[:, None]).exp_() @ membership_VR.to(wide)
        ctx.save_for_backward(features, weight, bias, membership_VR, token_ids_M, log_sum_M, share_MR)
        ctx.chunk_rows, ctx.product_dtype = chunk_rows, product_dtype
        return log_prob_M, share_MR

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor, grad_MR: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, membership_VR, token_ids_M, log_sum_M, share_MR = ctx.saved_tensors
        head = LMHeadOutput(features, weight.to(ctx.product_dtype), bias)
        wide = log_sum_M.dtype
        grad_features, grad_weight = torch.empty_like(features), torch.zeros_like(weight)
        grad_bias = torch.zeros_like(bias, dtype=wide)
        membership_RV = membership_VR.to(wide).t()
        grad_membership_VR = torch.zeros_like(membership_VR, dtype=wide)
        # the softmax takes away the mean of the gradients under P
        taken_M1 = ((grad_MR * share_MR).sum(1) + grad_M)[:, None]
        for rows in _blocks(head, ctx.chunk_rows):
            prob_NV = _logits(head, rows, wide).sub_(log_sum_M[rows, None]).exp_()
            grad_membership_VR += prob_NV.t() @ grad_MR[rows]
            grad_NV = torch.addmm(-taken_M1[rows], grad_MR[rows], membership_RV).mul_(prob_NV)
            grad_NV.scatter_add_(1, token_ids_M[rows, None], grad_M[rows, None])
            grad_bias += grad_NV.sum(0)
            grad_product_NV = grad_NV.to(ctx.product_dtype)
            grad_features[rows] = (grad_product_NV @ head.weight).to(features.dtype)
            grad_weight += grad_product_NV.t() @ features[rows].to(ctx.product_dtype)
        grads = (grad_bias.to(bias.dtype), grad_membership_VR.to(membership_VR.dtype))
        return grad_features, grad_weight, *grads, None, None, None


def _blocks(head: LMHeadOutput, chunk_rows: int, num_states: int = 1) -> Iterator[slice]:
    """Yield slices of masks; on a CPU their logits of all states fit into the cache."""
    num_rows, (vocab_size, width) = len(head.features), head.weight.shape
    if head.features.device.type == "cpu":
        # below D rows, reading the weights would cost more than reading the block
        chunk_rows = min(chunk_rows, max(width // num_states, _CPU_BLOCK_ELEMENTS // (vocab_size * num_states), 1))
    for start in range(0, num_rows, chunk_rows):
        yield slice(start, min(start + chunk_rows, num_rows))


def _logits(head: LMHeadOutput, rows: slice, dtype: torch.dtype) -> Float[Tensor, "N V"]:
    """Return logits of a block; the product has the dtype of the weight, the bias is added in another."""
    product_NV = head.features[rows].to(head.weight.dtype) @ head.weight.t()
    return product_NV.to(dtype).add_(head.bias)
