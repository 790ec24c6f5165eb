"""A series finishes its tasks one by one, keeps what is finished, and goes on after a task that diverges."""

import sys
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.cli.runs import runs_of_series
from exlm_cli.errors import CheckpointError, ConfigError, DataError, DivergedError, InterruptedRunError
from exlm_cli.experiments import series as series_module
from exlm_cli.experiments.series import begin_series, run_series
from exlm_cli.finetune.results import read_results
from exlm_cli.progress import SilentProgress
from tests.unit.finetune.synthetic import finetune_recipe
from tests.unit.tasks.glue_files import write_glue


def test_tasks_are_finished_one_by_one(text_model, tmp_path, monkeypatch):
    data = tmp_path / "data"
    names = ("rte", "cola", "mrpc")
    for name in names:
        write_glue(data, name, copies=2)
    recipes = [
        finetune_recipe(
            task={"name": f"glue/{name}", "data_dir": str(data), "sequence_length": 24},
            seeds=[1],
            train={"max_epochs": 1},
        )
        for name in names
    ]
    out = tmp_path / "all"
    begin = {"suite": "glue", "checkpoint": text_model, "out": out, "use_grid": False, "baseline": False}
    assert begin_series(recipes, **begin) == out
    with pytest.raises(CheckpointError, match="not empty") as refused:
        begin_series(recipes, **begin)
    assert f"`resume={out}`" in refused.value.hint
    with pytest.raises(CheckpointError, match="none of its runs is finished"):
        runs_of_series(out)
    hidden = (data / "RTE/train.tsv").rename(data / "train.tsv")
    with pytest.raises(DataError, match=r"^rte: .*RTE") as missing:
        begin_series(recipes, **begin)
    assert missing.value.hint.endswith("or run the others: `exlm finetune glue cola,mrpc`")
    hidden.rename(data / "RTE/train.tsv")
    train = series_module.run_finetuning
    errors: dict[str, Exception] = {
        "cola": DivergedError("the loss of step 1 is nan", "lower the learning rate"),
        "mrpc": InterruptedRunError("stopped at step 1", "continue with `exlm`", 2),
    }

    def failing(recipe: object, *, out: Path, **arguments: object) -> object:
        if out.name in errors:
            raise errors[out.name]
        return train(recipe, out=out, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(series_module, "run_finetuning", failing)
    with pytest.raises(InterruptedRunError, match="stopped") as stopped:
        run_series(out, checkpoint=None, progress=SilentProgress())
    assert (stopped.value.exit_code, stopped.value.hint) == (130, f"continue with `exlm finetune --resume {out}`")
    first = (out / "rte/results.json").stat().st_mtime_ns
    del errors["mrpc"]
    finished, diverged = run_series(out, checkpoint=None, progress=SilentProgress())
    assert [result.run_dir.name for result in finished] == ["rte", "mrpc"]
    assert runs_of_series(out) == [out / "mrpc", out / "rte"]
    assert len(diverged) == 1
    assert (out / "rte/results.json").stat().st_mtime_ns == first
    assert finished[0].results == read_results(out / "rte")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cuda"}, "torch sees no CUDA device"),
        ({"task": {"sequence_length": 500}}, "`task.sequence_length` 500 needs 500 positions"),
        ({"train": {"microbatch_tokens": 16}}, "`train.microbatch_tokens` 16 does not hold one sequence"),
        ({"train": {"report_to": ["wandb"]}}, "names wandb, which is not installed"),
    ],
)
def test_a_recipe_that_no_task_can_run_with_leaves_no_folder(text_model, tmp_path, monkeypatch, changes, said):
    """A resumption keeps the recipes, so that a folder with such a recipe would be of no use."""
    absent: Any = None  # as Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, "wandb", absent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write_glue(tmp_path / "data", "rte", copies=2)
    task = {"name": "glue/rte", "data_dir": str(tmp_path / "data"), "sequence_length": 24}
    recipe = finetune_recipe(**changes | {"task": task | changes.get("task", {})})
    with pytest.raises(ConfigError, match=said):
        begin_series(
            [recipe], suite="glue", checkpoint=text_model, out=tmp_path / "all", use_grid=False, baseline=False
        )
    assert not (tmp_path / "all").exists()
