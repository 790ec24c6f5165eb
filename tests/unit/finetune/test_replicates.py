"""A fine-tuning on several splits: one flat list of cells, kept, resumed, and refused before the first is trained."""

import json
from typing import Any

import pytest

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.errors import DataError
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


def test_a_split_is_trained_and_scored_as_in_a_run_of_its_own_and_kept(text_model, tmp_path):
    """The results are of the whole run: its time, its best epochs, its notes."""
    recipe = finetune_recipe(task=words_table(tmp_path), seeds=[1], train={"max_epochs": 2}, num_replicates=2)
    out = tmp_path / "whole"
    whole = run_finetuning(recipe, checkpoint=text_model, out=out)
    table, results = whole.scores.table, whole.results
    alone = []
    for seed in (0, 1):
        own = recipe.changed({"task.split_seed": seed, "num_replicates": 1})
        alone.append(run_finetuning(own, checkpoint=text_model, out=tmp_path / f"alone-{seed}"))
        rows = table[table.split_seed == seed].reset_index(drop=True)
        assert rows.equals(alone[-1].scores.table)
    first, second = (json.loads((out / name).read_text())["indices"] for name in ("split.json", "splits/split-1.json"))
    assert first != second
    assert results.elapsed_s == pytest.approx(sum(cell["elapsed_s"] for cell in cells(out)), abs=1e-2)
    assert results.best_epochs == (*alone[0].results.best_epochs, *alone[1].results.best_epochs)
    for seed, of_split in enumerate(alone):
        for note in of_split.results.notes:
            assert note in results.notes or f"split {seed}: {note}" in results.notes
    assert results.rows_interval is None, "eight test rows are too few"
    assert any("has no 95 % interval over rows" in note for note in results.notes)
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    again = resume_finetuning(out, ["num_replicates=3"]).scores.table
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert again[again.split_seed < 2].equals(table)
    assert again.split_seed.unique().tolist() == [0, 1, 2]


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
