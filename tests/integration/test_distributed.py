"""Several ranks train what one process trains: the same losses and weights but for rounding, killed or not.

Dropout is off, since its streams differ by rank. The one-process run is the reference; it is tested elsewhere.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.corpus.pipeline import prepare_data
from exlm_cli.data.sampler import plan_epoch
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics, read_run_json
from exlm_cli.train.checkpoint import saved_tensors, verify_checkpoint
from exlm_cli.train.pretrain import PretrainTask, resume_pretraining, run_pretraining
from tests.killed import die_at_call
from tests.ranks import note_error, noted_errors, own_rank, run_ranks
from tests.tiny import tiny_recipe

STEPS = 50
LOSS_BOUND, WEIGHT_BOUND = 1e-5, 1e-4
KEY_BIAS = "transition.key.bias"
"""Adds the same to all scores of a row, which the softmax takes away: it has no gradient, only rounding."""


@dataclass(frozen=True)
class Case:
    """One run on several ranks."""

    size: int
    parallel: str
    kind: str
    objective: str
    train: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.size}-{self.parallel}-{self.kind}-{self.objective}"


# every pair of values of two columns is in some row
CASES = [
    Case(2, "ddp", "text", "exlm", {}),
    Case(2, "fsdp", "smiles", "mlm", {"gradient_checkpointing": True}),
    Case(2, "fsdp", "text", "exlm", {"sharded_checkpoints": True}),
    Case(3, "ddp", "smiles", "exlm", {"gradient_checkpointing": True}),
    Case(3, "ddp", "text", "mlm", {}),
    Case(3, "fsdp", "smiles", "exlm", {"sharded_checkpoints": True}),
]


def recipe_of(cache: Path, kind: str, objective: str, **train: Any) -> PretrainRecipe:
    """Return a recipe of 50 steps in two epochs, with microbatches of a few sequences."""
    data: dict[str, dict[str, Any]] = {
        "text": {"train": ["bundled:grammar"], "bundled_rows": 302},
        "smiles": {"train": ["bundled:molecules"], "bundled_rows": 309},
    }
    masking = {"num_states_per_mask": 3 if objective == "exlm" else 1}
    return tiny_recipe(
        objective=objective,
        data={"kind": kind, "on_invalid": "skip", "cache_dir": str(cache), "sequence_length": 40, **data[kind]},
        masking=masking,
        model={"dropout": 0.0, "attention_dropout": 0.0, "max_length": 128},
        train={
            "max_steps": STEPS, "batch_sequences": 12, "microbatch_tokens": 200, "checkpoint_every_steps": 20,
            "validate_every_steps": 25, "log_every_steps": 1, "validation_sequences": 2, "num_threads": 1, **train,
        },
    )  # fmt: skip


def weights_of(run: Path) -> dict[str, Tensor]:
    """Return the weights at the end of a run, whole or in shares."""
    checkpoint = run / f"checkpoints/step-{STEPS}"
    assert verify_checkpoint(checkpoint) is None
    saved = saved_tensors(checkpoint, "model")
    found = {name: torch.empty(shape) for name, shape in saved.shapes.items()}
    for name, tensor in found.items():
        saved.copy_to(name, tensor)
    return found


def assert_same(mine: Path, theirs: Path) -> None:
    """Compare each row of metrics, and the weights, tensor by tensor."""
    rows, expected_rows = (read_metrics(run / "metrics.jsonl") for run in (mine, theirs))
    assert [row["step"] for row in rows] == [row["step"] for row in expected_rows]
    assert sum(row["kind"] == "train" for row in rows) == STEPS
    for row, expected in zip(rows, expected_rows, strict=True):
        assert math.isclose(row["loss"], expected["loss"], rel_tol=LOSS_BOUND), row["step"]
        assert row.get("num_infeasible") == expected.get("num_infeasible")
        assert row.get("mask_accuracy") == pytest.approx(expected.get("mask_accuracy"))
    weights, expected_weights = weights_of(mine), weights_of(theirs)
    assert weights.keys() == expected_weights.keys()
    scale = expected_weights.get("transition.key.weight", torch.ones(1)).norm()
    for name, tensor in weights.items():
        of = scale if name == KEY_BIAS else expected_weights[name].norm()
        assert (tensor - expected_weights[name]).norm() <= WEIGHT_BOUND * of, name


def train_all(recipes: list[tuple[PretrainRecipe, Path]]) -> None:
    """Train one run after the other, on whichever rank this is."""
    for recipe, out in recipes:
        run_pretraining(recipe, out=out)


def train_until_killed(recipe: PretrainRecipe, out: Path, notes: Path, dying: int, call: int) -> None:
    """Let one rank kill itself in a forward pass; the others note why they end."""
    if own_rank() == dying:
        die_at_call(PretrainTask, "losses", call)
    note_error(notes, lambda: run_pretraining(recipe, out=out))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def alone(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Runs of one process, by kind and objective."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {(case.kind, case.objective): folder / f"{case.kind}-{case.objective}" for case in CASES}
    train_all([(recipe_of(cache, *key), out) for key, out in runs.items()])
    return runs


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_what_one_process_trains(
    cache: Path, alone: dict[tuple[str, str], Path], tmp_path: Path, size: int
) -> None:
    cases = [case for case in CASES if case.size == size]
    recipes = [
        (recipe_of(cache, case.kind, case.objective, parallel=case.parallel, **case.train), tmp_path / case.name)
        for case in cases
    ]
    assert run_ranks(size, train_all, recipes) == [0] * size
    for case in cases:
        run = tmp_path / case.name
        assert_same(run, alone[case.kind, case.objective])
        assert (read_run_json(run).num_ranks, read_run_json(run).parallel) == (size, case.parallel)
        shares = list((run / f"checkpoints/step-{STEPS}").glob("*-of-*.safetensors"))
        assert len(shares) == (2 * size if case.train.get("sharded_checkpoints") else 0)


def test_the_last_step_of_an_epoch_has_fewer_sequences_than_ranks(cache: Path) -> None:
    """So the runs above have a rank with nothing to do in that step."""
    for kind in ("text", "smiles"):
        recipe = recipe_of(cache, kind, "exlm")
        data = prepare_data(recipe, rejected_csv=None, progress=SilentProgress())
        plan = plan_epoch(data.train.lengths, seed=1, epoch=0, batch_sequences=12, batch_tokens=None, bucket_steps=16)
        assert len(plan) < STEPS
        assert len(plan.step(len(plan) - 1)) < 2


@pytest.mark.parametrize(
    ("before", "after", "dying", "call", "parallel", "train"),
    [(2, 3, 1, 70, "fsdp", {"sharded_checkpoints": True}), (3, 1, 0, 35, "ddp", {})],
)
def test_a_killed_rank_is_named_and_another_number_of_ranks_goes_on(
    cache: Path,
    alone: dict[tuple[str, str], Path],
    tmp_path: Path,
    before: int,
    after: int,
    dying: int,
    call: int,
    parallel: str,
    train: dict[str, Any],
) -> None:
    out, recipe = tmp_path / "run", recipe_of(cache, "text", "exlm", parallel=parallel, **train)
    exit_codes = run_ranks(before, train_until_killed, recipe, out, tmp_path, dying, call)
    assert exit_codes == [-9 if rank == dying else 0 for rank in range(before)]
    errors = noted_errors(tmp_path)
    assert errors.keys() == set(range(before)) - {dying}
    for error in errors.values():
        assert error["type"] == "RankError"
        assert f"rank {dying} of {before} has ended" in error["message"]
        assert "--resume" in error["hint"]
        assert error["by"] == min(errors)
    assert run_ranks(after, resume_pretraining, out) == [0] * after
    assert_same(out, alone["text", "exlm"])
