"""Which layout predictions have, and where they go, follows from the task; another format is refused first."""

from dataclasses import replace
from pathlib import Path

import pytest

from exlm_cli.config.tasks import SUITES, SquadTaskConfig
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.finetune.model import Finetuned, load_finetuned
from exlm_cli.finetune.predict import predict
from exlm_cli.progress import SilentProgress
from tests.unit.finetune.finetuned_runs import write_rows


@pytest.fixture(scope="module")
def finetuned(molecules: Path) -> Finetuned:
    return load_finetuned(molecules, device="cpu")


def test_a_file_has_its_predictions_beside_the_others_of_the_run(finetuned: Finetuned, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "new.rows.csv", ["mol"], [["CCO"]])
    folder = tmp_path / "some" / "report"
    applied = predict(finetuned, table, None, folder=folder, column=None, progress=SilentProgress())
    assert applied.files == (folder / "predictions-new.rows.csv",)
    assert applied.files[0].is_file()


@pytest.mark.parametrize(
    ("task", "column", "written", "message"),
    [
        ("csv", None, "out.tsv", "`out=out.tsv`: predictions of csv go into a .csv file"),
        ("glue/rte", None, "out.csv", "`out=out.csv`: predictions of glue/rte go into a .tsv file"),
        ("squad/v2", None, "out.csv", "`out=out.csv`: predictions of squad/v2 go into a .json file"),
        ("glue/rte", "text", "out.tsv", "glue/rte finds its own columns: `--text-column` is for `exlm finetune csv`"),
    ],
)
def test_options_that_do_not_fit_the_task_are_refused(
    finetuned: Finetuned, task: str, column: str | None, written: str, message: str
) -> None:
    recipe = finetuned.recipe.model_copy(update={"task": SUITES[task.partition("/")[0]](name=task)})
    other = replace(finetuned, recipe=recipe, results=finetuned.results.model_copy(update={"task": task}))
    with pytest.raises(ConfigError) as caught:
        predict(other, Path("x"), Path(written), folder=Path(), column=column, progress=SilentProgress())
    assert caught.value.message == message


def test_a_folder_that_cannot_be_made_is_told_before_the_file_is_read(finetuned: Finetuned, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/sub: no such folder can be made: Not a directory"):
        predict(
            finetuned, Path("nowhere.csv"), None, folder=tmp_path / "file/sub", column=None, progress=SilentProgress()
        )


@pytest.mark.parametrize("is_named", [True, False])
def test_a_target_that_cannot_be_written_is_told_before_the_file_is_read(
    finetuned: Finetuned, tmp_path: Path, is_named: bool
) -> None:
    target = tmp_path / "predictions-nowhere.csv"
    target.mkdir()
    named = target if is_named else None
    with pytest.raises(CheckpointError) as caught:
        predict(finetuned, Path("nowhere.csv"), named, folder=tmp_path, column=None, progress=SilentProgress())
    assert caught.value.message == f"{target}: the file could not be written: Is a directory"


def test_the_second_file_of_answers_is_checked_too(finetuned: Finetuned, tmp_path: Path) -> None:
    recipe = finetuned.recipe.model_copy(update={"task": SquadTaskConfig(name="squad/v2")})
    (tmp_path / "a-no-answer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"a-no-answer\.json: the file could not be written: Is a directory"):
        predict(
            replace(finetuned, recipe=recipe), Path("nowhere.json"), tmp_path / "a.json", folder=tmp_path, column=None,
            progress=SilentProgress(),
        )  # fmt: skip
