"""Data parallelism: a model and its loss as one module, which DDP copies to every rank; one reduction a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from exlm_cli.distributed.ranks import Ranks

_MOST_GRAPHS = 64
"""Limit on the graphs of one function; torch's default is 8. Batches with and without padding, or with a single
sequence or mask need one each."""

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


class StepModule(nn.Module):
    """A model and its loss; the model runs in this forward pass alone, where the hooks of DDP fire.

    Args:
        model: The model.
        losses: Returns the losses, as `TrainTask.losses`, given the model and a batch.
    """

    def __init__(self, model: nn.Module, losses: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, batch: Any, run: Callable[[Any, Any], ResultT] | None = None) -> Tensor | ResultT:
        """Return the losses of a batch, or the result of `run(model, batch)`."""
        return self.losses(self.model, batch) if run is None else run(self.model, batch)

    def compile_step(self) -> None:
        """Compile encoder, heads and loss as one graph; validation stays eager."""
        self.losses = compiled(self.losses)


def compiled(function: Callable[ArgumentsT, ResultT]) -> Callable[ArgumentsT, ResultT]:
    """Compile a function as one whole graph for batches of any size."""
    # `torch.compile` has an argument for this limit in newer versions only
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    return torch.compile(function, fullgraph=True, dynamic=True)


def spread(module: nn.Module, ranks: Ranks) -> nn.Module:
    """Return a module that trains on all ranks, each with a copy of the weights; in one process the module itself."""
    return module if ranks.size == 1 else DistributedDataParallel(module, gradient_as_bucket_view=True)


def accumulating(module: nn.Module, *, is_last: bool) -> AbstractContextManager[object]:
    """Accumulate gradients of the backward pass inside; the last pass of a step averages them over ranks."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not is_last else nullcontext()
