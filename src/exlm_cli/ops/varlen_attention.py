"""Attention within sequences that lie one after the other in one tensor, without padding.

Axes: P rows and R queries of all sequences, N attention heads, H head width, B sequences.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

flash_attn_varlen_func: Callable[..., Tensor] | None = None
if importlib.util.find_spec("flash_attn"):
    try:
        flash_attn_varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:  # built for another torch, or a version without this function
        logging.getLogger("exlm_cli").warning("flash_attn is installed and not used: %s", error)


def has_varlen_kernel(device: torch.device, dtype: torch.dtype | None, head_width: int, dropout: float) -> bool:
    """Return whether a device has a kernel for `varlen_attention`: flash_attn's, or without dropout torch's own.

    Args:
        device: Both need CUDA and compute capability 8.0 or higher.
        dtype: Of autocast; None: float32, which neither has.
        head_width: H, of which both take multiples of 8 up to 256.
        dropout: Probability of dropping a weight in training.
    """
    if device.type != "cuda" or dtype is None or head_width % 8 or head_width > 256:
        return False
    is_new_enough = torch.cuda.get_device_capability(device) >= (8, 0)
    return is_new_enough and (flash_attn_varlen_func is not None or dropout == 0)


def varlen_attention(
    q: Float[Tensor, "R N H"],
    k: Float[Tensor, "P N H"],
    v: Float[Tensor, "P N H"],
    cu_queries: Int32[Tensor, " B+1"],
    cu_keys: Int32[Tensor, " B+1"],
    max_length: int,
    dropout: float,
) -> Float[Tensor, "R N H"]:
    """Attend within each sequence of a packed batch.

    CUDA: flash_attn's kernel if it is installed, else torch's. CPU: the reference, all rows against all keys
    under a mask.

    Args:
        q, k, v: Queries, keys and values.
        cu_queries, cu_keys: Sequence b has rows `cu_queries[b]` to `cu_queries[b + 1] - 1`; likewise keys and values.
        max_length: Maximum rows of a sequence.
        dropout: Probability of dropping a weight.
    """
    if q.device.type == "cpu":
        of_query, of_key = (
            torch.bucketize(torch.arange(len(rows)), cu[1:], right=True) for rows, cu in ((q, cu_queries), (k, cu_keys))
        )
        q_NRH, k_NPH, v_NPH = (rows.transpose(0, 1) for rows in (q, k, v))
        is_own_RP = of_query[:, None] == of_key
        mixed_NRH = F.scaled_dot_product_attention(q_NRH, k_NPH, v_NPH, attn_mask=is_own_RP, dropout_p=dropout)
        return mixed_NRH.transpose(0, 1)
    if flash_attn_varlen_func is not None:
        return flash_attn_varlen_func(q, k, v, cu_queries, cu_keys, max_length, max_length, dropout_p=dropout)
    assert dropout == 0, "`has_varlen_kernel` says that torch's kernel has no dropout"
    return cast(Tensor, varlen_attn(q, k, v, cu_queries, cu_keys, max_length, max_length))
