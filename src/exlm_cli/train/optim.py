"""AdamW, its parameter groups and its schedule."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from exlm_cli.config.sections import OptimConfig


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimiser step `step` (counted from 0): linear warm-up, then decay to `end_lr`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    decay_steps = max(1, total_steps - optim.warmup_steps)
    remaining = max(0.0, 1.0 - (step - optim.warmup_steps) / decay_steps)
    if optim.schedule == "polynomial":
        factor = math.pow(remaining, optim.power)
    elif optim.schedule == "cosine":
        factor = 0.5 * (1.0 - math.cos(math.pi * remaining))
    else:
        factor = 1.0
    return optim.end_lr + (optim.lr - optim.end_lr) * factor


def build_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and embeddings, none on biases and norms; fused where the device has it."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, factor)
