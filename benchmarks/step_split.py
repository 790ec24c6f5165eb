"""Timing of the parts of a real training step, forward and backward.

Wrappers around the parts of the model mark their beginning and end. In the backward pass a gradient hook on the output
of a part marks where its backward begins: autograd finishes the later part before it starts the earlier one, so the
parts do not mix. The time between two marks belongs to the part entered last, so the parts add up to the step. On a
CUDA device the marks are events of the stream.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch
from exlm_cli.train import objective
from exlm_cli.train.loop import TrainingLoop
from harness import Stopwatch

Pass = Literal["forward", "backward", "both"]


class Part(NamedTuple):
    """Part of a step; `both` if it has no separate backward pass."""

    name: str
    direction: Pass = "both"


DATA, OPTIMISER, OTHER = Part("data"), Part("optimiser"), Part("other")
ORDER = ("data", "encoder", "lm_head", "transition", "alignment", "optimiser", "other")


class StepClock:
    """Clock of one step, with a mark at the start of each part."""

    def __init__(self, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)
        self._entered: list[Part] = []

    @property
    def current(self) -> Part:
        """Part that time is counted to."""
        return self._entered[-1]

    def enter(self, part: Part) -> None:
        """Count time to this part from now on."""
        self._stopwatch.mark()
        self._entered.append(part)

    def totals_ms(self) -> dict[Part, float]:
        """Return the milliseconds of every part but the last one entered, and the sums over both passes."""
        totals: dict[Part, float] = defaultdict(float)
        for part, lap_ms in zip(self._entered, self._stopwatch.laps_ms(), strict=False):
            totals[part] += lap_ms
            if part.direction != "both":
                totals[Part(part.name)] += lap_ms
        return dict(totals)


@contextmanager
def split_step(loop: TrainingLoop) -> Iterator[StepClock]:
    """Mark the parts of the steps inside this context; restore loop and model afterwards.

    `data` is the wait for the next batch; `encoder` includes embedding and the gathering of node states; `optimiser`
    includes freeing, scaling and clipping gradients; `other` is the sums between them.
    """
    model: Any = loop.task.model
    clock = StepClock(next(model.parameters()).device)

    def batches_marked(indices: IntArray) -> Iterator[Batch]:
        batches = type(loop).batches(loop, indices)
        while True:
            clock.enter(DATA)
            batch = next(batches, None)
            if batch is None:
                break
            clock.enter(OTHER)
            yield batch
        clock.enter(OPTIMISER)

    def zero_grad(*, set_to_none: bool) -> None:
        clock.enter(OPTIMISER)
        type(loop.optimizer).zero_grad(loop.optimizer, set_to_none=set_to_none)
        clock.enter(OTHER)

    wrapped: list[tuple[Any, str, str, Callable[[Any], Tensor]]] = [
        (model, "node_states", "encoder", lambda nodes: nodes.states),
        (model, "log_emissions", "lm_head", lambda log_emit: log_emit),
        (model, "token_log_probs", "lm_head", lambda log_probs: log_probs),
        (model, "log_transitions", "transition", lambda log_trans: log_trans),
        (objective, "states_alignment_nll", "alignment", lambda nll: nll),
        (objective, "single_target_ctc_nll", "alignment", lambda nll: nll),
    ]
    with ExitStack() as stack:
        for owner, name, part, output in wrapped:
            marking = _marking(clock, getattr(owner, name), part, output)
            stack.enter_context(mock.patch.object(owner, name, marking))
        stack.enter_context(mock.patch.object(loop, "batches", batches_marked))
        stack.enter_context(mock.patch.object(loop.optimizer, "zero_grad", zero_grad))
        # tied to the decoder: its gradient is complete when the backward pass reaches the input
        weight = model.decoder_weight
        stack.callback(weight.register_post_accumulate_grad_hook(lambda _: clock.enter(OTHER)).remove)
        stack.callback(loop.optimizer.register_step_post_hook(lambda *_: clock.enter(OTHER)).remove)
        clock.enter(OTHER)
        yield clock
        clock.enter(OTHER)


def _marking(
    clock: StepClock, call: Callable[..., Any], name: str, output: Callable[[Any], Tensor]
) -> Callable[..., Any]:
    """Return a part of the model with marks; `output` picks the tensor whose gradient starts its backward pass."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        before = clock.current
        clock.enter(Part(name, "forward"))
        result = call(*args, **kwargs)
        output(result).register_hook(lambda _: clock.enter(Part(name, "backward")))
        clock.enter(before)
        return result

    return marked
