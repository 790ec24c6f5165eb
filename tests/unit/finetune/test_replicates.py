"""Replicates of a fine-tuning on several splits: kept, resumed, and refused before the first is trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.errors import DataError
from exlm_cli.finetune import run as run_module
from exlm_cli.finetune.results import read_results
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.tasks.registry import load_task
from tests.ranks import note_error, noted_errors, run_ranks
from tests.unit.finetune.synthetic import ONE_EPOCH, finetune_recipe, words_table


def test_replicates_are_runs_on_other_splits_and_finished_ones_are_kept(text_model, tmp_path):
    task = words_table(tmp_path)
    recipe = finetune_recipe(task=task, train={"max_epochs": 1}, num_replicates=2)
    out = tmp_path / "run"
    results = run_finetuning(recipe, checkpoint=text_model, out=out).results
    other = out / "replicates/split-1"
    splits = [json.loads((run / "split.json").read_text())["indices"] for run in (out, other)]
    assert splits[0] != splits[1]
    joined = results.replication
    assert joined is not None
    assert joined.split_seeds == (0, 1)
    assert joined.metrics["test"]["loss"].values == (
        *results.metrics["test"]["loss"].values, *read_results(other).metrics["test"]["loss"].values
    )  # fmt: skip
    kept = (other / "cells/single/seed-1/result.json").stat().st_mtime_ns
    again = resume_finetuning(out, ["num_replicates=3"]).results
    assert (other / "cells/single/seed-1/result.json").stat().st_mtime_ns == kept
    assert again.replication is not None
    assert again.replication.metrics["test"]["loss"].values[:4] == joined.metrics["test"]["loss"].values


def test_a_split_without_rows_is_refused_before_any_is_trained(text_model, tmp_path, monkeypatch):
    """Those of the seeds 3 and 4 have rows, that of 5 has none to validate on."""

    def load_split(config: Any, progress: Any) -> Any:
        if config.split_seed == 5:
            raise DataError("csv: the split leaves no rows in `valid`", "give more rows")
        return load_task(config, progress)

    monkeypatch.setattr(run_module, "load_task", load_split)
    task, out = {**words_table(tmp_path), "split_seed": 3}, tmp_path / "run"
    recipe = finetune_recipe(task=task, num_replicates=4, **ONE_EPOCH)
    said = "split 3 of 4, `task.split_seed` 5: csv: the split leaves no rows in `valid`"
    with pytest.raises(DataError, match=said) as caught:
        run_finetuning(recipe, checkpoint=text_model, out=out)
    assert caught.value.hint.startswith("`num_replicates=2` ends before it; ")
    assert not out.exists()
    results = run_finetuning(recipe.changed({"num_replicates": 2}), checkpoint=text_model, out=out).results
    before = (out / "recipe.yaml").read_bytes()
    with pytest.raises(DataError, match=said):
        resume_finetuning(out, ["num_replicates=4"])
    assert (out / "recipe.yaml").read_bytes() == before
    assert resume_finetuning(out).results == results


def test_rank_0_refuses_a_split_without_rows_for_all_ranks(text_model, tmp_path):
    recipe = finetune_recipe(task=words_table(tmp_path), num_replicates=3, **ONE_EPOCH)
    assert run_ranks(2, _refuse_the_last_split, tmp_path, recipe, text_model) == [0, 0]
    first, other = noted_errors(tmp_path).values()
    assert first["message"].startswith("split 3 of 3, `task.split_seed` 2: ")
    assert other["message"] == f"rank 0: {first['message']}"
    assert not (tmp_path / "run").exists()


def _refuse_the_last_split(folder: Path, recipe: FinetuneRecipe, checkpoint: Path) -> None:
    def load_split(config: Any, progress: Any) -> Any:
        if config.split_seed == 2:
            raise DataError("csv: the split leaves no rows in `valid`", "give more rows")
        return load_task(config, progress)

    run_module.load_task = load_split
    note_error(folder, lambda: run_finetuning(recipe, checkpoint=checkpoint, out=folder / "run"))
