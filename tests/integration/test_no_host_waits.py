"""A training step that never waits: on tensors without data, and as one graph of the compiler.

Reading a value from a `meta` tensor raises, and the compiler with `fullgraph` refuses to be interrupted. So a step that
runs on both has no place where a device would have to be waited for.
"""

import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.alignment.native import obstacle
from exlm_cli.train.objective import Objective
from tests.tiny import SPECIAL, tiny_batch, tiny_recipe

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"objective": "mlm"},
    {"model": DROPOUT},
    {"model": {"rope": "1d"}},
    {"model": {"rope": "fractional", "transition": {"rope": "nodes", "start": "lanes"}}},
    {"model": {"transition": {"start": "hazard"}}},
    {"model": {"alignment": "sparse_dag", "transition": {"rope": "tokens"}}},
    {"model": {"alignment": "independent"}},
    {"model": {"clone_embedding": "nodes", "transition": {"heads": 2, "position_features": True, "max_nodes": 64}}},
    {"train": {"head_chunk_rows": 7}},
    {"model": {"mask_attention": "first"}},
]


COMPILED = [("torch", VARIANTS[1]), ("torch", VARIANTS[4]), ("native", VARIANTS[5]), ("torch", VARIANTS[7])]


def _setup(backend: str, sections: dict[str, Any]) -> tuple[ExlmModel, Objective, Any]:
    recipe = tiny_recipe(**sections)
    torch.manual_seed(0)
    return ExlmModel(recipe, SPECIAL.vocab_size), Objective(4, 1, backend), recipe  # type: ignore[arg-type]


def _counted_loss(losses: torch.Tensor) -> torch.Tensor:
    return torch.where(losses != math.inf, losses, 0.0).sum()


@pytest.mark.parametrize("sections", VARIANTS)
@pytest.mark.parametrize("lengths", [(10, 10, 10), (9, 4, 12)])
def test_a_step_runs_on_tensors_without_data(sections: dict[str, Any], lengths: tuple[int, ...]) -> None:
    model, objective, recipe = _setup("torch", sections)
    model = model.to("meta")
    losses = objective.sequence_nll(model, tiny_batch(recipe, lengths).to(torch.device("meta")))
    assert losses.shape == (3,)
    _counted_loss(losses).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_reading_a_value_of_such_a_tensor_raises() -> None:
    batch = tiny_batch(tiny_recipe()).to(torch.device("meta"))
    for read in (
        lambda: batch.lengths.max().item(),
        lambda: (batch.node_mask >= 0).nonzero(),
        lambda: bool(batch.lengths[0]),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()


# the compiler warns inside itself; without its code generator, tracing takes seconds
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("backend", "sections"), COMPILED)
def test_a_step_is_one_graph_for_batches_of_any_size(backend: str, sections: dict[str, Any]) -> None:
    """One graph with padding and one without: sequences, positions, nodes and targets are symbols. Equal losses."""
    if backend == "native" and (reason := obstacle(torch.float32, torch.device("cpu"))):
        pytest.skip(f"needs the compiled kernels: {reason}")
    model, objective, recipe = _setup(backend, {**sections, "model": {"num_layers": 1, **sections.get("model", {})}})
    model.eval()  # dropout of the compiler draws other numbers
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(objective.sequence_nll, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ((9, 4, 12), (11, 11, 11, 11), (30, 2, 8, 9, 10), (14, 14, 14), (12, 13), (40,) * 7):
        batch = tiny_batch(recipe, lengths)
        losses = compiled(model, batch)
        _counted_loss(losses).backward()
        torch.testing.assert_close(losses, objective.sequence_nll(model, batch))
    assert counter.frame_count == 2
