"""Replicates of a fine-tuning on several splits: kept, resumed, and refused before the first is trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.data.molecules import read_molecules as read
from exlm_cli.data.rows.table import read_table
from exlm_cli.errors import DataError
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.finetune.scores import read_scores
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks import user_table
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows import inputs
from exlm_cli.tasks.rows import task as rows_task
from exlm_cli.tasks.rows.splits import RowSplit, split_rows
from tests.ranks import note_error, noted_errors, run_ranks
from tests.unit.finetune.synthetic import ONE_EPOCH, amines, finetune_recipe, words_table


def failing_at(seed: int) -> Any:
    """Return `split_rows` for a table that has no rows to validate on when it is split again with a seed."""

    def split_again(config: CsvTaskConfig, *given: Any) -> RowSplit:
        if config.split_seed == seed:
            raise DataError("csv: the split leaves no rows in `valid`", "give more rows")
        return split_rows(config, *given)

    return split_again


def test_replicates_are_runs_on_other_splits_and_finished_ones_are_kept(text_model, tmp_path):
    task = words_table(tmp_path)
    recipe = finetune_recipe(task=task, train={"max_epochs": 1}, num_replicates=2)
    out = tmp_path / "run"
    result = run_finetuning(recipe, checkpoint=text_model, out=out)
    other = out / "replicates/split-1"
    splits = [json.loads((run / "split.json").read_text())["indices"] for run in (out, other)]
    assert splits[0] != splits[1]
    assert result.results.replication is not None
    assert result.results.replication.split_seeds == (0, 1)
    rows = result.scores.table
    assert rows.split_seed.unique().tolist() == [0, 1]
    of_other = read_scores(other).table
    assert rows[rows.split_seed == 1].reset_index(drop=True).equals(of_other)
    kept = (other / "cells/single/seed-1/result.json").stat().st_mtime_ns
    again = resume_finetuning(out, ["num_replicates=3"]).scores.table
    assert (other / "cells/single/seed-1/result.json").stat().st_mtime_ns == kept
    assert again[again.split_seed < 2].equals(rows)
    assert again.split_seed.unique().tolist() == [0, 1, 2]


def test_the_table_is_read_once_and_every_split_is_that_of_a_run_of_its_own(tmp_path, monkeypatch):
    """Its molecules are parsed once too."""
    smiles, task = amines(tmp_path)
    calls = []
    monkeypatch.setattr(user_table, "read_table", lambda *given: calls.append("table") or read_table(*given))
    monkeypatch.setattr(inputs, "read_molecules", lambda *given, **how: calls.append("rdkit") or read(*given, **how))
    recipe = finetune_recipe(task=task, num_replicates=3, **ONE_EPOCH)
    run_finetuning(recipe, checkpoint=smiles, out=tmp_path / "run")
    assert calls == ["table", "rdkit"]
    for seed in (1, 2):
        alone = load_task(recipe.changed({"task.split_seed": seed, "num_replicates": 1}).task, SilentProgress())
        split = json.loads((tmp_path / f"run/replicates/split-{seed}/split.json").read_text())["indices"]
        assert split == {name: rows.tolist() for name, rows in alone.split_indices.items()}


def test_a_split_without_rows_is_refused_before_any_is_trained(text_model, tmp_path, monkeypatch):
    """Those of the seeds 3 and 4 have rows, that of 5 has none to validate on."""
    monkeypatch.setattr(rows_task, "split_rows", failing_at(5))
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
    rows_task.split_rows = failing_at(2)  # type: ignore[attr-defined]
    note_error(folder, lambda: run_finetuning(recipe, checkpoint=checkpoint, out=folder / "run"))
