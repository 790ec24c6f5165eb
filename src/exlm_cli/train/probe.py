"""Speed of a device on a recipe: FLOP/s of a second's forward and backward passes through one block of its size."""

import time

import torch
from torch import nn

from exlm_cli.config.pretrain import PretrainRecipe

_PROBE_S = 1.0
_SHORTEST_PASS_S = 0.05
"""A pass this long keeps all cores, or the GPU, busy: its batch is large enough."""


def measure_flops(recipe: PretrainRecipe, device: torch.device, dtype: torch.dtype | None) -> float:
    """Return the FLOP/s of training one block of the recipe's widths on full sequences.

    The block is PyTorch's own, with dropout, norms and attention, so that what a step spends outside matrix products
    is in the time and not in the FLOPs. Data, LM head, alignment and optimizer are left out; a run is usually slower.

    Args:
        recipe: Decides widths, length and dropout.
        device: Where it is measured.
        dtype: Of autocast; None: float32.
    """
    model, length = recipe.model, recipe.repeated_length
    flops = 3 * length * (8 * model.width**2 + 4 * model.width * model.ffn_width + 4 * length * model.width)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.autocast(device.type, dtype, enabled=dtype is not None):
        block = nn.TransformerEncoderLayer(
            model.width,
            model.num_heads,
            model.ffn_width,
            model.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
            device=device,
        )
        most = max(1, recipe.train.microbatch_tokens // length)
        num_sequences, elapsed_s = 1, 0.0
        while True:  # the first pass warms up and is not used
            _pass_s(block, num_sequences, length)
            elapsed_s = _pass_s(block, num_sequences, length)
            if elapsed_s >= _SHORTEST_PASS_S or num_sequences == most:
                break
            num_sequences = min(most, 2 * num_sequences)
        num_passes, total_s = 1, elapsed_s
        while total_s < _PROBE_S:
            total_s += _pass_s(block, num_sequences, length)
            num_passes += 1
    return num_passes * num_sequences * flops / total_s


def _pass_s(block: nn.TransformerEncoderLayer, num_sequences: int, length: int) -> float:
    """Return the seconds of one forward and backward pass."""
    weight = block.linear1.weight
    states = torch.randn(num_sequences, length, weight.shape[1], device=weight.device, requires_grad=True)
    _wait_for(weight.device)
    started_s = time.perf_counter()
    block(states).sum().backward()
    _wait_for(weight.device)
    return time.perf_counter() - started_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
