"""A fine-tuning on several splits: one flat list of cells, kept, resumed, and refused before the first is trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.errors import DataError
from exlm_cli.finetune.predictions import read_seed_predictions
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.tasks import user_table
from exlm_cli.tasks.rows.splits import RowSplit, split_rows
from tests.unit.finetune.synthetic import ONE_EPOCH, cells, finetune_recipe, words_table


def failing_at(seed: int) -> Any:
    """Return `split_rows` for a table that has no rows to validate on when it is split again with a seed."""

    def split_again(config: CsvTaskConfig, *given: Any) -> RowSplit:
        if config.split_seed == seed:
            raise DataError("csv: the split leaves no rows in `valid`", "give more rows")
        return split_rows(config, *given)

    return split_again


def split_files(run: Path) -> list[Path]:
    return [run / "split.json", *sorted((run / "splits").iterdir())]


def test_cells_of_every_split_are_in_one_folder_and_finished_ones_are_kept(text_model, tmp_path):
    task = words_table(tmp_path)
    recipe = finetune_recipe(task=task, train={"max_epochs": 1}, num_replicates=2)
    out = tmp_path / "run"
    result = run_finetuning(recipe, checkpoint=text_model, out=out)
    places = {str(path.parent.relative_to(out / "cells")) for path in out.rglob("result.json")}
    assert places == {f"single/split-{split}/seed-{seed}" for split in (0, 1) for seed in (1, 2)}
    first, second = (json.loads(path.read_text())["indices"] for path in split_files(out))
    assert first != second
    for of_split, indices in zip(result.results.of_splits, (first, second), strict=True):
        rows = {part: np.array(indices[part]) for part in ("valid", "test")}
        assert read_seed_predictions(out, of_split, rows)["test"].shape == (2, len(indices["test"]), 1)
    assert result.results.split_seeds == (0, 1)
    table = result.scores.table
    assert table.split_seed.unique().tolist() == [0, 1]
    kept = (out / "cells/single/split-1/seed-1/result.json").stat().st_mtime_ns
    again = resume_finetuning(out, ["num_replicates=3"]).scores.table
    assert (out / "cells/single/split-1/seed-1/result.json").stat().st_mtime_ns == kept
    assert again[again.split_seed < 2].equals(table)
    assert again.split_seed.unique().tolist() == [0, 1, 2]


def test_a_split_is_trained_and_scored_as_in_a_run_of_its_own(text_model, tmp_path):
    """The results are of the whole run: its time, its best epochs, its notes."""
    recipe = finetune_recipe(task=words_table(tmp_path), train={"max_epochs": 2}, num_replicates=2)
    whole = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "whole")
    alone = []
    for seed in (0, 1):
        own = recipe.changed({"task.split_seed": seed, "num_replicates": 1})
        alone.append(run_finetuning(own, checkpoint=text_model, out=tmp_path / f"alone-{seed}"))
        rows = whole.scores.table[whole.scores.table.split_seed == seed].reset_index(drop=True)
        assert rows.equals(alone[-1].scores.table)
    results = whole.results
    assert results.elapsed_s == pytest.approx(sum(cell["elapsed_s"] for cell in cells(tmp_path / "whole")), abs=1e-2)
    assert results.best_epochs == (*alone[0].results.best_epochs, *alone[1].results.best_epochs)
    for seed, of_split in enumerate(alone):
        for note in of_split.results.notes:
            assert note in results.notes or f"split {seed}: {note}" in results.notes
    assert results.rows_interval is None, "eight test rows are too few"
    assert any("has no 95 % interval over rows" in note for note in results.notes)


def test_a_split_without_rows_is_refused_before_any_is_trained(text_model, tmp_path, monkeypatch):
    """Those of the seeds 3 and 4 have rows, that of 5 has none to validate on."""
    monkeypatch.setattr(user_table, "split_rows", failing_at(5))
    task, out = {**words_table(tmp_path), "split_seed": 3}, tmp_path / "run"
    recipe = finetune_recipe(task=task, num_replicates=4, **ONE_EPOCH)
    said = "split 3 of 4, `task.split_seed` 5: csv: the split leaves no rows in `valid`"
    with pytest.raises(DataError, match=said) as caught:
        run_finetuning(recipe, checkpoint=text_model, out=out)
    assert caught.value.hint.startswith("`--num-replicates 2` ends before it; ")
    assert not out.exists()
    results = run_finetuning(recipe.changed({"num_replicates": 2}), checkpoint=text_model, out=out).results
    before = (out / "recipe.yaml").read_bytes()
    with pytest.raises(DataError, match=said):
        resume_finetuning(out, ["num_replicates=4"])
    assert (out / "recipe.yaml").read_bytes() == before
    assert resume_finetuning(out).results == results
