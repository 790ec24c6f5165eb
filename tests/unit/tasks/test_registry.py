"""The registry loads each suite's task, and every task has its recipe."""

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.tasks import SUITES, CsvTaskConfig
from exlm_cli.errors import DataError
from exlm_cli.tasks.registry import load_task, require_local_files
from tests.recorder import Recorder


@pytest.mark.parametrize("task", [task for section in SUITES.values() for task in section.tasks])
def test_every_task_has_a_recipe_of_its_own(task):
    assert load_recipe(task.replace("/", "-"), kind=FinetuneRecipe).task.name == task


def test_a_file_that_is_two_splits_is_warned_of_and_its_texts_noted(tmp_path):
    """However its path is written. Values of two columns: the epoch is chosen by an error without a unit."""
    path = tmp_path / "a.csv"
    path.write_text("text,y,z\n" + "".join(f"row {i},{i},{100 * i}\n" for i in range(4)))
    files = {"train": "a.csv", "valid": f"../{tmp_path.name}/a.csv"}
    config = CsvTaskConfig.model_validate(
        {"name": "csv", "text_column": "text", "label_columns": ["y", "z"], "data_dir": str(tmp_path), "files": files}
    )
    progress = Recorder()
    task = load_task(config, progress)
    assert any(said.startswith(f"warning: {path} ") for said in progress.said)
    assert any(note.startswith("4 texts in more than one split") for note in task.notes)
    assert (task.selection_metric, task.is_greater_better) == ("standardised_rmse", False)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_table_that_has_moved_is_asked_for_with_the_key_that_names_it(tmp_path, split):
    (tmp_path / "a.csv").write_text("smiles,y\nC,1\nCC,0\n")
    files = {"train": "a.csv", "valid": "a.csv", split: "moved/b.csv"}
    config = CsvTaskConfig.model_validate(
        {"name": "csv", "label_columns": ["y"], "data_dir": str(tmp_path), "files": files}
    )
    with pytest.raises(DataError, match=r"b\.csv: no such file") as caught:
        require_local_files(config)
    assert f"`--set task.files.{split}=FILE`" in caught.value.hint
