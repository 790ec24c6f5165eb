"""Data parallelism: DDP, or FSDP2 with the weights of each block sharded; one gradient reduction a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from exlm_cli.config.sections import LoopConfig
from exlm_cli.distributed.ranks import Ranks
from exlm_cli.model.encoder import EncoderBlock

MANY_PARAMETERS = 2_000_000_000
"""Parameters above which `auto` takes FSDP: weights, gradients and moments are 16 bytes each, 32 GB in all."""

_MOST_GRAPHS = 64
"""Limit on the graphs of one function; torch's default is 8. Batches with and without padding, or with a single
sequence or mask need one each, and all blocks share them."""

Strategy = Literal["none", "ddp", "fsdp"]
ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


def choose_strategy(train: LoopConfig, ranks: Ranks, num_parameters: int) -> Strategy:
    """Return how a model is spread over ranks: not at all in one process; `auto` is DDP for all but huge models."""
    if ranks.size == 1:
        return "none"
    if train.parallel != "auto":
        return train.parallel
    return "fsdp" if num_parameters > MANY_PARAMETERS else "ddp"


def compiled(function: Callable[ArgumentsT, ResultT]) -> Callable[ArgumentsT, ResultT]:
    """Compile a function as one whole graph for batches of any size."""
    # `torch.compile` has an argument for this limit in newer versions only
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    return torch.compile(function, fullgraph=True, dynamic=True)


def compile_blocks(module: nn.Module) -> None:
    """Compile each block of an encoder as a graph of its own, in training and in validation; call it before `spread`.

    The hooks of FSDP, which gather and free the weights of a block, then run between the graphs, as in torchtitan.
    """
    for block in module.modules():
        if isinstance(block, EncoderBlock):
            block.forward = compiled(block.forward)  # type: ignore[method-assign]


class StepModule(nn.Module):
    """A model and its loss; the model runs in this forward pass alone, where the hooks of DDP and FSDP fire.

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

    def compile_step(self, strategy: Strategy) -> None:
        """Compile encoder, heads and loss as one graph; validation stays eager. Under `fsdp` compile the blocks."""
        if strategy == "fsdp":
            compile_blocks(self)
        else:
            self.losses = compiled(self.losses)


def spread(module: nn.Module, strategy: Strategy, ranks: Ranks, autocast_dtype: torch.dtype | None) -> nn.Module:
    """Wrap a module for training on all ranks.

    Args:
        module: Module that training calls; `fsdp` replaces its parameters in place by shards.
        strategy: Result of `choose_strategy`.
        ranks: All ranks.
        autocast_dtype: Under `fsdp` also the type in which the weights of blocks are gathered; None: float32.
    """
    if strategy == "ddp":
        return DistributedDataParallel(module, gradient_as_bucket_view=True)
    if strategy == "fsdp":
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        # gradients of many microbatches add up, over ranks too: in float32
        policy = MixedPrecisionPolicy(autocast_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
        for block in module.modules():
            if isinstance(block, EncoderBlock):
                fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh)
    return module


@contextmanager
def accumulating(module: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Accumulate gradients of the backward pass inside; the last pass of a step averages them over ranks."""
    held: AbstractContextManager[object] = nullcontext()
    if isinstance(module, DistributedDataParallel) and not is_last:
        held = module.no_sync()
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
    with held:
        yield


def reshard(module: nn.Module) -> None:
    """Free the weights that FSDP keeps gathered after a forward pass without a backward pass, as in a validation.

    Until then the parameters of the module are not those of the optimizer.
    """
    if isinstance(module, FSDPModule):
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, which all ranks must call; return any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def writes_shares(module: nn.Module, train: LoopConfig) -> bool:
    """Return whether each rank writes its own rows of a checkpoint, as `train.sharded_checkpoints` says."""
    if not isinstance(module, FSDPModule):
        return False
    if train.sharded_checkpoints is not None:
        return train.sharded_checkpoints
    return sum(p.numel() for p in module.parameters()) > MANY_PARAMETERS
