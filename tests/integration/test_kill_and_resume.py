"""`kill -9` anywhere, then `--resume`: the same weights, bit by bit, as a run that was not disturbed."""

import pytest
import torch
from safetensors.torch import load_file

from exlm_cli.train import checkpoint, loop
from exlm_cli.train.pretrain import resume_pretraining, run_pretraining
from exlm_cli.train.pretrain_task import PretrainTask
from tests.killed import die_at_call, run_until_killed, untimed_rows
from tests.tiny import CHAIN, tiny_recipe

POINTS = {
    "before the first step": (PretrainTask, "losses", 1),
    "between checkpoints": (PretrainTask, "losses", 8),
    "while the second checkpoint is hashed": (checkpoint, "_sha256", 4),
    "while the second checkpoint is synced": (checkpoint, "fsync", 11),
    "while validating": (PretrainTask, "validate", 2),
    "in the middle of a row of metrics": (loop.MetricsLog, "append", 7),
}
# a chain is killed between the checkpoint of step 6 and its beginning, MLMs in `test_sweep_kill.py`
CASES = [("exlm", point) for point in POINTS] + [("chain", "between checkpoints")]


def _recipe(cache, objective):
    return tiny_recipe(
        data={"bundled_rows": 300, "cache_dir": str(cache)},
        model={
            **(CHAIN | {"chain": {"num_classes": 5, "starts_at": 0.7}} if objective == "chain" else {}),
            "dropout": 0.1, "attention_dropout": 0.1,
        },
        train={
            "max_steps": 10, "batch_sequences": 12, "microbatch_tokens": 200, "checkpoint_every_steps": 3,
            "validate_every_steps": 4, "log_every_steps": 1, "validation_sequences": 3, "keep_last": 2,
            "num_threads": 1,
        },
    )  # fmt: skip


def train_and_die(recipe, out, point):
    """Train in the process at hand until it dies."""
    owner, function, count = POINTS[point]

    def leave_half_a_row(metrics, *_):
        with metrics.path.open("a") as file:
            file.write('{"kind": "train", "st')

    before = leave_half_a_row if function == "append" else lambda *_: None
    die_at_call(owner, function, count, before=before)
    run_pretraining(recipe, out=out)


@pytest.fixture(scope="module")
def undisturbed(cache, tmp_path_factory):
    runs = {objective: tmp_path_factory.mktemp("undisturbed") / "run" for objective in ("exlm", "chain")}
    for objective, out in runs.items():
        run_pretraining(_recipe(cache, objective), out=out)
    return runs


@pytest.mark.parametrize(("objective", "point"), CASES)
def test_a_killed_run_ends_like_an_undisturbed_one(cache, undisturbed, tmp_path, objective, point):
    whole, out = undisturbed[objective], tmp_path / "run"
    run_until_killed(train_and_die, _recipe(cache, objective), out, point)
    assert resume_pretraining(out).steps == 10
    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(run / "checkpoints/step-10" / name) for run in (whole, out))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert untimed_rows(out) == untimed_rows(whole)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-10", "step-9"]
