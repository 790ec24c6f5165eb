"""AdamW, its parameter groups and its schedule, and the loss scale of fp16."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from exlm_cli.config.sections import OptimConfig
from exlm_cli.train.checkpoint import LossScaleState


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimiser step `step` (counted from 0): linear warm-up, then `optim.schedule`."""
    warmup_steps = optim.resolve_warmup_steps(total_steps)
    if step < warmup_steps:
        return optim.lr * (step + 1) / warmup_steps
    decay_steps = max(1, total_steps - warmup_steps)
    remaining = max(0.0, 1.0 - (step - warmup_steps) / decay_steps)
    if optim.schedule == "polynomial":
        factor = remaining
    elif optim.schedule == "cosine":
        factor = 0.5 * (1.0 - math.cos(math.pi * remaining))
    else:
        factor = 1.0
    return optim.lr * factor


def build_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices and embeddings, none on biases and norms; fused.

    Each group says under `is_encoder` whether its parameters are those of `model.encoder`.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups: list[dict[str, Any]] = []
    for is_encoder in (False, True):
        part = [p for name, p in trained.items() if name.startswith("encoder.") == is_encoder]
        # start_scores, the one vector that is neither bias nor norm, does not decay either: zero is not its origin
        for is_matrix, decay in ((True, optim.weight_decay), (False, 0.0)):
            params = [p for p in part if (p.ndim >= 2) == is_matrix]
            groups.append({"params": params, "weight_decay": decay, "is_encoder": is_encoder})
    return torch.optim.AdamW(
        groups,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, step: int, optim: OptimConfig, total_steps: int) -> None:
    """Set the learning rate of each group of `build_optimizer` for a step, counted from 0.

    The encoder's is scaled by `optim.encoder_lr_scale`, and zero until `optim.encoder_starts_at`; at zero AdamW moves
    nothing, weight decay included.
    """
    rate = learning_rate(step, optim, total_steps)
    has_begun = step >= optim.encoder_starts_at * total_steps
    for group in optimizer.param_groups:
        group["lr"] = rate * (optim.encoder_lr_scale if has_begun else 0.0) if group["is_encoder"] else rate


class LossScale:
    """Factor on the losses of a step in fp16, a power of two, so that small gradients do not become zero.

    A step whose gradients overflow moves no weights and halves it; `GROWTH_STEPS` steps in a row without overflow
    double it. These are the rules of `torch.amp.GradScaler`, which begins at 2^16 for a mean; here a step adds up the
    losses of a few hundred sequences. And it looks at the gradients of one process, where here the norm of those of all
    ranks decides. Everything stays on the device.

    Args:
        device: That of the gradients.

    Attributes:
        value: () float32.
        good_steps: () float32, steps since it last changed or a step overflowed.
    """

    START, LOWEST, GROWTH_STEPS = 2.0**8, 1.0, 2000

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), self.START, device=device)
        self.good_steps = torch.zeros((), device=device)

    def update(self, is_finite: Bool[Tensor, ""]) -> None:
        """Follow a step, whose gradients were finite or not; never waits."""
        good_steps = torch.where(is_finite, self.good_steps + 1, 0.0)
        grows = good_steps >= self.GROWTH_STEPS
        factor = torch.where(is_finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.value = (self.value * factor).clamp(min=self.LOWEST)
        self.good_steps = torch.where(grows, 0.0, good_steps)

    def state(self) -> LossScaleState:
        """Return what a checkpoint keeps; waits for the device."""
        return LossScaleState(value=float(self.value), good_steps=int(self.good_steps))

    def restore(self, state: LossScaleState) -> None:
        """Go on from a checkpoint."""
        self.value = self.value.new_tensor(state.value)
        self.good_steps = self.good_steps.new_tensor(state.good_steps)


def update_weights(
    optimizer: torch.optim.AdamW,
    parameters: Sequence[nn.Parameter],
    *,
    loss_sum: Float[Tensor, ""],
    num_counted: Float[Tensor, ""],
    num_ranks: int,
    clip_norm: float,
    loss_scale: LossScale | None = None,
) -> Float[Tensor, ""]:
    """Scale and clip the gradients and step, unless the loss or the gradient norm is not finite; never waits.

    A step that is not finite leaves weights and moments as they are, through the `found_inf` flag of fused optimisers,
    which `torch.amp.GradScaler` sets as well. So the weights are intact when the host reads the metrics later.

    Args:
        optimizer: Result of `build_optimizer`.
        parameters: Their gradients are sums over the sequences of a step, averaged over ranks.
        loss_sum, num_counted: Loss and number of the sequences that count, over all ranks; float64, on the device.
        num_ranks: Number of ranks that the gradients are averaged over.
        clip_norm: Largest norm; 0 does not clip.
        loss_scale: Factor that the gradients have; it follows the step.

    Returns:
        Norm of the gradients before clipping, on the device.
    """
    factor = num_counted.new_full((), num_ranks) / num_counted
    if loss_scale is not None:
        factor = factor / loss_scale.value
    torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor.float())
    # a limit of inf clips nothing and still measures the norm
    norm = nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf)
    is_finite = loss_sum.isfinite() & (num_counted > 0) & norm.isfinite()
    optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
    optimizer.step()
    if loss_scale is not None:
        loss_scale.update(is_finite)
    return norm
