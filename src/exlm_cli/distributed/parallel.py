"""Data parallelism: a model and its loss as one module, which DDP copies to every rank; one reduction a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from exlm_cli.distributed.ranks import Ranks


class StepModule(nn.Module):
    """A model and its loss; training runs the model in this forward pass alone, where the hooks of DDP fire.

    Args:
        model: The model.
        losses: Returns the losses, as `TrainTask.losses`, given the model and a batch.
    """

    def __init__(self, model: nn.Module, losses: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, batch: Any) -> Tensor:
        """Return the losses of a batch."""
        return self.losses(self.model, batch)


def wrap_ddp(module: nn.Module, ranks: Ranks) -> nn.Module:
    """Return a module that trains on all ranks, each with a copy of the weights; in one process the module itself."""
    if ranks.size == 1:
        return module
    # buffers are the same on all ranks without being sent in each forward pass: every rank sets them by the step;
    # `broadcast_buffers=False` warns from torch 2.13 on, and its successor is not in 2.11
    buffers = [name for name, _ in module.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, buffers)
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def no_sync_unless_last(module: nn.Module, *, is_last: bool) -> AbstractContextManager[object]:
    """Accumulate gradients of the backward pass inside; the last pass of a step averages them over ranks."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not is_last else nullcontext()
