"""Files of the official layouts through a fine-tuned model: the server's table, and scores equal to scikit-learn's."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score

from exlm_cli.errors import DataError
from exlm_cli.finetune.model import Finetuned, load_finetuned
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.applied import Applied
from exlm_cli.tasks.glue_tasks import GLUE_TASKS
from exlm_cli.tasks.predict_glue import apply_to_glue_file
from tests.unit.finetune.finetuned_runs import glue_run
from tests.unit.tasks.glue_files import ROWS, content

NAMES = ["rte", "mrpc", "stsb"]


@pytest.fixture(scope="module")
def models(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finetuned]:
    return {
        name: load_finetuned(glue_run(tmp_path_factory.mktemp(name), text_model, name), device="cpu") for name in NAMES
    }


def applied_to(finetuned: Finetuned, path: Path, text: str) -> tuple[Applied, list[list[str]]]:
    path.write_text(text, encoding="utf-8")
    out = path.with_name("out.tsv")
    applied = apply_to_glue_file(finetuned, path, out, progress=SilentProgress())
    return applied, [line.split("\t") for line in out.read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_a_development_file_is_predicted_and_scored(models: dict[str, Finetuned], name: str, tmp_path: Path) -> None:
    applied, (header, *rows) = applied_to(models[name], tmp_path / "dev.tsv", content(name, copies=2))
    truths = [target for *_, target in ROWS[name]] * 2
    assert (header, len(rows), applied.num_rows) == (["index", "prediction"], len(truths), len(truths))
    assert [row[0] for row in rows] == [str(i) for i in range(len(truths))]
    classes = GLUE_TASKS[name].classes
    if name == "stsb":
        values = np.array([float(row[1]) for row in rows])
        assert ((values >= 0) & (values <= 5)).all()
        # the file has six digits of what is scored
        assert applied.metrics["pearsonr"] == pytest.approx(stats.pearsonr(truths, values).statistic, abs=1e-2)
    else:
        accepted = [str(i) for i in range(2)] if name == "mrpc" else list(classes)
        found = [accepted.index(row[1]) for row in rows]
        assert applied.metrics["accuracy"] == pytest.approx(accuracy_score(truths, found), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_test_file_without_labels_is_predicted_alike(models: dict[str, Finetuned], name: str, tmp_path: Path) -> None:
    """The official test files have `index` and the texts; so has what is left of a development file."""
    finetuned = models[name]
    labelled, with_labels = applied_to(finetuned, tmp_path / "dev.tsv", content(name))
    label = {"rte": "label", "mrpc": "Quality", "stsb": "score"}[name]
    rows = [line.split("\t") for line in content(name).splitlines()]
    dropped = rows[0].index(label)
    bare = "".join("\t".join(c for i, c in enumerate(row) if i != dropped) + "\n" for row in rows)
    applied, found = applied_to(finetuned, tmp_path / "test.tsv", bare)
    assert found == with_labels
    assert labelled.metrics
    assert applied.metrics == {}


def test_the_index_of_a_file_is_its_own_and_hub_test_sets_have_minus_one(
    models: dict[str, Finetuned], tmp_path: Path
) -> None:
    finetuned = models["rte"]
    text = "index\tsentence1\tsentence2\tlabel\n41\ta b\tc\t-1\n7\tamber\t\t-1\n"
    applied, rows = applied_to(finetuned, tmp_path / "test.tsv", text)
    assert [row[0] for row in rows[1:]] == ["41", "7"]
    assert (applied.metrics, applied.notes) == ({}, ())
    applied, _ = applied_to(finetuned, tmp_path / "test.tsv", text.replace("b\tc\t-1", "b\tc\tentailment"))
    assert applied.notes == ("not scored: 1 of 2 rows have no label",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index\tsentence1\n0\ta\n",
         "{path}: rte needs the columns `sentence1` `sentence2`; there are `index`, `sentence1`"),
        ("index\tsentence1\tsentence2\n0\ta\n", "{path}:2: the row has 2 cells, expected 3"),
        ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tactive\n",
         "{path}:2: `label` is `active`, accepted: 0 or entailment, 1 or not_entailment"),
        ("", "{path}: the file is empty"),
        ("index\tsentence1\tsentence2\n", "{path}: no rows in it"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_whole(
    models: dict[str, Finetuned], tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        applied_to(models["rte"], tmp_path / "dev.tsv", text)
    assert caught.value.message == message.format(path=tmp_path / "dev.tsv")
    assert not (tmp_path / "out.tsv").exists()
