"""`kill -9` anywhere, then `--resume`: the same weights, bit by bit, as a run nobody disturbed.

The run is a process of its own that kills itself at a chosen point, so nothing depends on timing.
"""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from exlm_cli.config.load import dump_recipe
from exlm_cli.run_dir import read_metrics
from exlm_cli.train.pretrain import resume_pretraining, run_pretraining
from tests.tiny import tiny_recipe

KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from exlm_cli.config.load import load_recipe
from exlm_cli.train import checkpoint, loop, pretrain

module_name, function_name, count, recipe, out = sys.argv[1:]
owner = {"checkpoint": checkpoint, "loop": loop, "task": pretrain.PretrainTask, "metrics": loop.MetricsLog}[module_name]
original, calls = getattr(owner, function_name), 0

def dying(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(count):
        if function_name == "append":
            args[0].path.open("a").write('{"kind": "train", "st')
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

setattr(owner, function_name, dying)
pretrain.run_pretraining(load_recipe(recipe), out=Path(out))
"""

POINTS = [
    pytest.param("task", "losses", 1, id="before the first step"),
    pytest.param("task", "losses", 8, id="between checkpoints"),
    pytest.param("checkpoint", "_sha256", 4, id="while the second checkpoint is hashed"),
    pytest.param("checkpoint", "fsync", 11, id="while the second checkpoint is synced"),
    pytest.param("task", "validate", 2, id="while validating"),
    pytest.param("metrics", "append", 7, id="in the middle of a row of metrics"),
]


def _recipe(cache: Path, objective: str) -> Any:
    return tiny_recipe(
        objective=objective,
        data={"bundled_rows": 300, "cache_dir": str(cache)},
        model={"dropout": 0.1, "attention_dropout": 0.1},
        train={
            "max_steps": 10, "batch_sequences": 12, "microbatch_tokens": 200, "checkpoint_every_steps": 3,
            "validate_every_steps": 4, "log_every_steps": 1, "validation_sequences": 3, "keep_last": 2,
            "num_threads": 1,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=["exlm", "mlm"])
def undisturbed(request, cache, tmp_path_factory) -> tuple[Path, Any]:
    recipe = _recipe(cache, request.param)
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run_pretraining(recipe, out=out)
    return out, recipe


def _rows(run: Path) -> list[dict[str, Any]]:
    timed = {"elapsed_s", "tokens_per_s"}
    return [{k: v for k, v in row.items() if k not in timed} for row in read_metrics(run / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "function", "count"), POINTS)
def test_a_killed_run_ends_like_an_undisturbed_one(
    undisturbed, tmp_path, owner: str, function: str, count: int
) -> None:
    whole, recipe = undisturbed
    recipe_file, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe_file.write_text(dump_recipe(recipe))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, owner, function, str(count), str(recipe_file), str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = resume_pretraining(out)
    assert result.steps == 10
    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(run / "checkpoints/step-10" / name) for run in (whole, out))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert _rows(out) == _rows(whole)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-10", "step-9"]
