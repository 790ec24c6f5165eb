"""A training step that never waits: on tensors without data, and as one graph of the compiler.

Reading a value from a `meta` tensor raises, and the compiler with `fullgraph` refuses to be interrupted. So a step that
runs on both has no place where a device would have to be waited for.
"""

import importlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from exlm_cli.config.finetune import FinetuneModelConfig
from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch
from exlm_cli.data.sampler import EpochPlan
from exlm_cli.finetune.cells.runner import TaskBatch, collate, losses_of_outputs, task_losses, task_outputs
from exlm_cli.model import exlm
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import TaskModel
from exlm_cli.ops.alignment.native import obstacle
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import MetricsLog
from exlm_cli.tasks.base import EncodedRows, Loss
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.objective import Objective
from exlm_cli.train.optim import scale_and_clip
from exlm_cli.train.process import StopSignal
from tests.tiny import OUTPUT, SPECIAL, tiny_batch, tiny_recipe
from tests.unit.model.test_exlm import VARIANTS

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
COMPILED: list[tuple[str, dict[str, Any]]] = [
    ("native", {"objective": "mlm"}),
    ("native", {"model": OUTPUT | {"transition": {"rope": "nodes", "start": "lanes"}}}),
    ("native", {"model": {"transition": {"rope": "nodes"}}}),
    ("native", {"model": {"alignment": "independent"}}),
]


def _setup(backend: str, sections: dict[str, Any]) -> tuple[ExlmModel, Objective, Any]:
    recipe = tiny_recipe(**sections)
    torch.manual_seed(0)
    return ExlmModel(recipe, SPECIAL.vocab_size), Objective(4, 1, backend), recipe  # type: ignore[arg-type]


def _backward(losses: torch.Tensor) -> None:
    torch.where(losses != math.inf, losses, 0.0).sum().backward()


def _assert_all_have_gradients(model: nn.Module) -> None:
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def _compiled(function: Any) -> tuple[Any, Any]:
    """Return a function as graphs for sizes of any kind, not one of which may break, and their counter.

    Without the code generator of the compiler, tracing takes seconds.
    """
    # not above: every worker of a test run reads this file, and no other test needs the tools of the compiler
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter), counter


@pytest.mark.parametrize("sections", [*VARIANTS, COMPILED[1][1], {"model": DROPOUT}])
@pytest.mark.parametrize("lengths", [(10, 10, 10), (9, 4, 12)])
def test_a_step_runs_on_tensors_without_data(sections, lengths):
    model, objective, recipe = _setup("native", sections)
    model = model.to("meta")
    losses = objective.sequence_nll(model, tiny_batch(recipe, lengths).to(torch.device("meta")))
    assert losses.shape == (3,)
    _backward(losses)
    _assert_all_have_gradients(model)


def test_a_step_that_computes_logits_again_runs_on_tensors_without_data(monkeypatch):
    monkeypatch.setattr(exlm, "HEAD_CHUNK_ROWS", 7)
    test_a_step_runs_on_tensors_without_data({}, (9, 4, 12))


class _WithoutData:
    """A task for the training loop whose batches and model have no data."""

    def __init__(self, model: nn.Module, objective: Objective, batches: list[Batch]) -> None:
        self.model, self.objective, self.given = model, objective, batches
        self.module, self.identity = model, {"data fingerprint": "none"}

    def plan(self, epoch: int) -> EpochPlan:
        return np.split(np.arange(12), 4)

    def begin_step(self, share_done: float) -> None:
        """Do nothing."""

    def microbatches(self, indices: IntArray, epoch: int) -> Iterator[Batch]:
        return iter(self.given)

    def losses(self, batch: Batch) -> torch.Tensor:
        return self.objective.sequence_nll(self.model, batch)  # type: ignore[arg-type]

    def count_tokens(self, batch: Batch) -> int:
        return batch.num_tokens

    def count_flops(self, batch: Batch) -> float:
        return batch.flops

    def validate(self) -> dict[str, float]:
        return {"loss": 0.0}


@pytest.mark.parametrize("sections", [*VARIANTS[:2], {"train": {"precision": "fp16"}}])
def test_steps_of_the_training_loop_run_on_tensors_without_data(sections, tmp_path, monkeypatch):
    """Accumulation, scaling, clipping, the fused update and the loss scale included; only a row reads a value."""
    # the fused kernel has an implementation without data, but the optimiser lists devices that have data
    checks = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(checks, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    model, objective, recipe = _setup("native", sections)
    batches = [tiny_batch(recipe, lengths).to(torch.device("meta")) for lengths in ((10, 10), (9, 4, 12))]
    loop = TrainingLoop(
        _WithoutData(model.to("meta"), objective, batches),
        recipe.train,
        recipe.optim,
        seed=1,
        run=tmp_path,
        metrics=MetricsLog(tmp_path / "metrics.jsonl"),
        progress=SilentProgress(),
        resume_command="exlm pretrain --resume RUN",
    )
    for _ in range(6):
        loss = loop.advance(StopSignal())
        assert loss is not None
        assert loss.is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):
        loop._read_metrics()


def test_reading_a_value_of_such_a_tensor_raises():
    batch = tiny_batch(tiny_recipe()).to(torch.device("meta"))
    for read in (
        lambda: batch.lengths.max().item(),
        lambda: (batch.node_mask >= 0).nonzero(),
        lambda: bool(batch.lengths[0]),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("backend", "sections"), COMPILED)
def test_a_step_is_one_graph_for_batches_of_any_size(backend, sections):
    """Sequences, positions, nodes and targets are symbols. Equal losses.

    One graph with padding and one without; of a DAG, also for equal and for different numbers of masks.

    No two axes of the first batches have the same size by chance, which the compiler would take for one symbol.
    """
    if backend == "native" and (reason := obstacle(torch.float32, torch.device("cpu"))):
        pytest.skip(f"needs the compiled kernels: {reason}")
    model, objective, recipe = _setup(backend, {**sections, "model": {"num_layers": 1, **sections.get("model", {})}})
    model.eval()  # dropout of the compiler draws other numbers
    compiled, counter = _compiled(objective.sequence_nll)
    kinds = set()
    for lengths in ((9, 4, 13), (11, 11, 11, 11), (30, 2, 8, 9, 10), (14, 14, 14), (12, 13), (40,) * 7):
        batch = tiny_batch(recipe, lengths)
        kinds.add((batch.is_padded, batch.is_even and recipe.has_transitions))
        losses = compiled(model, batch)
        _backward(losses)
        torch.testing.assert_close(losses, objective.sequence_nll(model, batch))
    assert counter.frame_count == len(kinds) == (3 if recipe.has_transitions else 2)


@pytest.mark.filterwarnings("default")
def test_what_follows_the_backward_pass_is_one_graph():
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    torch._dynamo.reset()
    compiled = torch.compile(scale_and_clip, fullgraph=True, backend="eager")
    norm = compiled(list(model.parameters()), torch.tensor(0.25, dtype=torch.float64), 0.5)
    assert float(norm) == pytest.approx(0.5 * math.sqrt(8))
    assert all(torch.allclose(p.grad, torch.full_like(p, 0.5 / math.sqrt(8))) for p in model.parameters())


NAN = math.nan
TARGETS: dict[Loss, list[list[float]]] = {
    "binary": [[1, 0], [NAN, 1], [NAN, NAN]],
    "classes": [[1], [NAN], [0]],
    "regression": [[0.5, NAN], [NAN, NAN], [1.0, 2.0]],
    "span": [[0, 1], [1, 1], [0, 0]],
}
"""Targets of each kind of loss, to be repeated; some are missing."""
FINE_TUNINGS = [(loss, num_repeats) for loss in TARGETS for num_repeats in ((1, 3) if loss == "span" else (1,))]


def _task_model(loss: Loss, num_repeats: int) -> TaskModel:
    recipe = tiny_recipe(objective="mlm", masking={"num_repeats": num_repeats}, model={"num_layers": 1})
    torch.manual_seed(0)
    dropout = FinetuneModelConfig(dropout=0.1, attention_dropout=0.1, pooler_dropout=0.1)
    return TaskModel(recipe, dropout, SPECIAL.vocab_size, None if loss == "span" else 2)


def _task_batch(loss: Loss, num_repeats: int, lengths: tuple[int, ...]) -> TaskBatch:
    rows = tuple(np.array([SPECIAL.cls_id, *range(5, 5 + length), SPECIAL.sep_id]) for length in lengths)
    targets = np.array([TARGETS[loss][i % 3] for i in range(len(lengths))])
    answerable = tuple(np.arange(length + 2) <= length for length in lengths) if loss == "span" else None
    split = EncodedRows(rows, targets, answerable)
    return collate(split, np.arange(len(lengths)), num_repeats=num_repeats, pad_id=SPECIAL.pad_id)


@pytest.mark.parametrize(("loss", "num_repeats"), FINE_TUNINGS)
@pytest.mark.parametrize("lengths", [(4, 4, 4), (6, 2, 5)])
def test_a_step_of_fine_tuning_runs_on_tensors_without_data(loss, num_repeats, lengths):
    model = _task_model(loss, num_repeats).to("meta")
    weights = torch.ones(2, device="meta") if loss in ("binary", "classes") else None
    batch = _task_batch(loss, num_repeats, lengths).to(torch.device("meta"))
    _backward(task_losses(model, batch, loss, weights))
    _assert_all_have_gradients(model)


OF_SIZES = ((7, 2, 5), (6, 6, 6, 6), (9, 4, 8, 3, 7), (5, 5, 5), (12, 10, 11, 10))
"""Lengths of the sequences of batches."""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("loss", "num_repeats"), [("binary", 1), ("span", 1), ("span", 3)])
def test_a_step_of_fine_tuning_is_one_graph_for_batches_of_any_size(loss, num_repeats):
    """One graph with padding and one without, of encoder, head and loss, missing labels included. Equal losses."""
    model = _task_model(loss, num_repeats).eval()  # dropout of the compiler draws other numbers
    compiled, counter = _compiled(task_losses)
    for lengths in OF_SIZES:
        batch = _task_batch(loss, num_repeats, lengths)
        losses = compiled(model, batch, loss, None)
        _backward(losses)
        torch.testing.assert_close(losses, task_losses(model, batch, loss, None))
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("loss", ["classes", "regression"])
def test_another_loss_of_the_same_outputs_is_one_graph_for_batches_of_any_size(loss):
    """Encoder and head, which take seconds to trace, are those of the step above."""
    model = _task_model(loss, 1).eval()
    compiled, counter = _compiled(losses_of_outputs)
    for lengths in OF_SIZES:
        batch = _task_batch(loss, 1, lengths)
        losses = compiled(model, task_outputs(model, batch), batch, loss, None)
        _backward(losses)
        torch.testing.assert_close(losses, task_losses(model, batch, loss, None))
    assert counter.frame_count == 1
