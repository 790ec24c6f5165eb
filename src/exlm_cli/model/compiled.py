"""`torch.compile` of single functions, for tensors of any size; whatever the compiler cannot do is done without it."""

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_logger = logging.getLogger("exlm_cli")
_MOST_GRAPHS = 64
"""Of one function, in one process."""


class Compiler:
    """Compiles functions until one of them fails; then all run eagerly, and one line says so.

    Attributes:
        has_failed: Whether that has happened.
    """

    has_failed = False

    def __init__(self) -> None:
        # dynamo also logs each failure with its stack; the line of `compiled` is enough
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
        # counted over all models of a process, of which a sweep or a benchmark has many
        torch._dynamo.config.recompile_limit = max(_MOST_GRAPHS, torch._dynamo.config.recompile_limit)

    def compiled(self, function: Callable[P, ResultT]) -> Callable[P, ResultT]:
        """Return a function as one graph, with symbols for all sizes of its tensors.

        Its graphs are one for each combination of modes, of dtypes, and of arguments that are None.
        """
        run = torch.compile(function, fullgraph=True, backend=compile_graph)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            if self.has_failed:
                return function(*args, **kwargs)
            given = _pytree.tree_map_only(Tensor, _of_any_size, (args, kwargs))
            try:
                return run(*given[0], **given[1])
            except Exception as error:  # the compiler's errors have no base class in common
                if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
                    raise
                self.has_failed = True
                _logger.warning("note: the model could not be compiled, and runs without: %s", _reason(error))
                return function(*args, **kwargs)

        return call


def _of_any_size(value: Tensor) -> Tensor:
    """Return the tensor with a symbol for each size."""
    if not torch.is_grad_enabled():
        value = value.detach()  # the compiler reads the sizes of what a view is of, and one sequence has its own graph
    # not `torch.compile(dynamic=True)`, which takes two axes of equal size for one
    torch._dynamo.maybe_mark_dynamic(value, list(range(value.ndim)))
    return value


def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile a graph, its backward pass included, which would else fail in the middle of a step's backward pass."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(force_non_lazy_backward_lowering=True):
        return cast(Callable[..., Any], compile_fx(graph, inputs))


def _reason(error: BaseException) -> str:
    """Return the first line of the error that the compiler's own error wraps."""
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        error = inner
    return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])
