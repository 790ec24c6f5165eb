"""The page of a run holds its scores, verdict and figures, needs no other file, and a browser shows it."""

import re
import shlex
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.config.load import dump_recipe
from exlm_cli.errors import CheckpointError
from exlm_cli.files import write_json
from exlm_cli.finetune.evaluation.calibration import (
    CALIBRATION_FILE,
    fit_calibration,
    read_scored_split,
    with_scores,
)
from exlm_cli.finetune.prediction.training_rows import training_rows_of
from exlm_cli.finetune.predictions import PartRows, write_predictions, write_rows
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.progress import SilentProgress
from exlm_cli.report.finetuning.page import write_page
from exlm_cli.report.style import RUN_COLOURS
from exlm_cli.run_dir import update_run_json
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.rows.task import LabelledRows, RowTask
from tests.unit.finetune.synthetic import finetune_recipe
from tests.unit.report.results import Values, at_folder, scored, svg_texts

CHROMIUM = shutil.which("chromium")
ALONE = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1100,1600",
)  # fmt: skip


SMILES = ("CCO", "CC(=O)Oc1ccccc1C(=O)O", "c1ccccc1", "CCN(CC)CC")
"""What the rows of the runs here are, in turn."""


def write_run(
    folder: Path,
    run: FinetunedRun,
    targets: dict[str, FloatArray],
    outputs: dict[str, FloatArray],
    *,
    inputs: Sequence[str] = SMILES,
    similarity: dict[str, FloatArray] | None = None,
    has_places: bool = True,
) -> FinetunedRun:
    """Write what the page reads of a run on `<b>.csv`: every seed predicts the same, and trained on ethanol alone.

    Args:
        targets: (N, C) of each split; (N, 1) class index for classes.
        outputs: (N, C) probabilities or values of each split but `train`.
        inputs: What the rows are, in turn.
        similarity: Of the rows of each split; None: that to ethanol.
        has_places: Whether the places of rows in their file are known.
    """
    folder.mkdir(exist_ok=True)
    results = run.results
    is_smiles = results.input_kind == "smiles"
    columns = {"smiles_column": "smiles"} if is_smiles else {"text_column": "text"}
    task = {"name": "csv", "files": {"train": "/data/<b>.csv"}, "label_columns": list(results.output_names), **columns}
    (folder / "recipe.yaml").write_text(dump_recipe(finetune_recipe(task=task)), encoding="utf-8")
    update_run_json(folder, {"command": "finetune", "device": "cpu"})
    parts: Any = {
        split: PartRows(
            np.arange(len(of_split)),
            of_split,
            [inputs[row % len(inputs)] for row in range(len(of_split))],
            [f"line {row + 2}" for row in range(len(of_split))] if has_places else [],
            (similarity or near_ethanol(inputs, is_smiles=is_smiles, num=len(of_split))).get(split),
        )
        for split, of_split in targets.items()
    }
    write_rows(folder, results.loss, results.output_names, {0: parts})
    for seed in results.seeds:
        cell = folder / f"cells/single/split-0/seed-{seed}"
        cell.mkdir(parents=True, exist_ok=True)
        rows: Any = {split: np.arange(len(of_split)) for split, of_split in outputs.items()}
        write_predictions(cell, results.output_names, outputs, rows)  # type: ignore[arg-type]
    fitted = fit_calibration(results.loss, outputs["valid"], parts["valid"])
    write_json(folder / CALIBRATION_FILE, fitted)
    write_json(folder / CALIBRATION_FILE, with_scores(fitted, read_scored_split(folder, results)))
    return at_folder(run, folder)


def near_ethanol(inputs: Sequence[str], *, is_smiles: bool, num: int) -> dict[str, FloatArray]:
    """Return the similarity of rows, which are the inputs in turn, to ethanol."""
    if not is_smiles:
        return {}
    examples = LabelledRows([("CCO",)], np.zeros((1, 1)), np.zeros(1, dtype=np.int64))
    trained = RowTask("csv", "binary", ("y",), {"train": examples})
    trained.input_kind = "smiles"
    found = training_rows_of([trained]).nearest_tanimoto(
        [inputs[row % len(inputs)] for row in range(num)], SilentProgress()
    )[0]
    return {"valid": found, "test": found}


def labels_run(folder: Path, **changes: Any) -> FinetunedRun:
    """Return a run of two seeds and two labels of 40 rows, one of which is called like a tag."""
    names = ("active", "<b>toxic</b>")
    values = {"roc_auc": [0.7, 0.8]}
    sizes = {"train": 40, "valid": 40, "test": 40}
    run = scored("run", "csv", values, output_names=names, split_sizes=sizes, **changes)
    rng = np.random.default_rng(0)
    targets = {split: rng.integers(0, 2, (40, 2)).astype(float) for split in sizes}
    return write_run(folder, run, targets, {split: rng.random((40, 2)) for split in ("valid", "test")})


def value_run(folder: Path, errors: FloatArray, inputs: Sequence[str]) -> FinetunedRun:
    """Return a run of one value, whose test rows have errors given in order; all predictions are 0."""
    sizes = {"train": 4, "valid": 4, "test": len(errors)}
    run = scored(
        "run", "csv", {"rmse": [0.5]}, loss="regression", output_names=("logS",), split_sizes=sizes, seeds=(1,)
    )
    targets = {"train": np.ones((4, 1)), "valid": np.ones((4, 1)), "test": errors[:, None]}
    outputs = {"valid": np.zeros((4, 1)), "test": np.zeros((len(errors), 1))}
    return write_run(folder, run, targets, outputs, inputs=inputs)


def sections_of(text: str) -> dict[str, str]:
    """Return the content of each section of a page by its heading."""
    parts = text.split("<h2>")[1:]
    return {unescape(part.partition("</h2>")[0]): part.partition("</h2>")[2] for part in parts}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "<my run>"
    changes = {"notes": ("cut `a<b` of the rows",), "verdict": ("The model is <better>.",)}
    return write_page(labels_run(folder, **changes))


def test_a_page_holds_everything_and_names_no_other_file(page):
    text = page.read_text(encoding="utf-8")
    assert all(said in text for said in ("The model is &lt;better&gt;.", "roc_auc", "<code>a&lt;b</code>"))
    assert f"exlm predict {shlex.quote(str(page.parent))} FILE --explain\n" in unescape(text)
    assert not re.search(r"<b>toxic|<b>\.csv|<script|https?://|<link", text)
    assert "<title>&lt;b&gt;.csv: active, &lt;b&gt;toxic&lt;/b&gt;: &lt;my run&gt;</title>" in text
    assert "<h1>&lt;b&gt;.csv: active, &lt;b&gt;toxic&lt;/b&gt;</h1>" in text
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert {"Scores, test", "Calibration", "Worst predicted molecules, test", "Notes"} <= set(sections_of(text))


def test_page_and_pictures_say_which_split_they_are_of(page):
    assert "40/40/40 rows in train, valid, test (scaffold split)" in page.read_text(encoding="utf-8")
    drawn = {path.stem: " ".join(svg_texts(path)) for path in (page.parent / "report").glob("*.svg")}
    assert {"labels", "error-by-distance", "test-curves", "test-calibration"} <= drawn.keys()
    assert all("scaffold split" in texts for texts in drawn.values())


@pytest.mark.parametrize(
    ("split", "seeds", "said"),
    [
        ("random", (3,), "random split 3"),
        ("scaffold", (3,), "scaffold split"),
        ("column", (0,), "split by a column"),
        ("random", (0, 1), "2 random splits"),
    ],
)
def test_a_split_is_named_with_its_seed_where_it_has_one(split, seeds, said):
    run = scored("run", "csv", {"roc_auc": [0.5] * len(seeds)}, split=split, split_seeds=seeds)
    assert run.results.split_words == said


@pytest.mark.usefixtures("figures")
def test_every_model_of_the_scores_has_a_row(tmp_path):
    forests = {"forest-ecfp4": {"roc_auc": [0.9, 0.9]}, "a model <of tomorrow>": {"roc_auc": [0.6, 0.6]}}
    text = write_page(labels_run(tmp_path, forests=forests)).read_text(encoding="utf-8")
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", sections_of(text)["Scores, test"])
    rows = [unescape(" ".join(cells[i : i + 3])) for i in range(0, len(cells), 3)]
    assert rows == [
        "exlm 0.7500 0.7500",
        "exlm, single seeds 0.7500 ± 0.0707 0.7500 ± 0.0707",
        "ECFP4 + random forest 0.9000 0.9000",
        "a model <of tomorrow> 0.6000 0.6000",
    ]


@pytest.mark.usefixtures("figures")
def test_the_largest_errors_are_drawn_and_apart_from_them_those_near_the_training_molecules(tmp_path):
    """Ethanol, every second row, is a training molecule; of its errors, two are in the largest quarter of all."""
    row_N = np.arange(40)
    errors = np.select([row_N % 10 == 0, row_N % 2 == 0, row_N < 16], [1.0, 0.1, 2.0], 0.5) + row_N / 1000
    text = write_page(value_run(tmp_path, errors, inputs=("CCO", "c1ccccc1"))).read_text(encoding="utf-8")
    sections = sections_of(text)
    worst, near = (sections[f"{name} molecules, test"] for name in ("Worst predicted", "Most surprising"))
    rows_of = [[int(line) - 2 for line in re.findall(r"line (\d+) of the file", part)] for part in (worst, near)]
    by_error = sorted(range(40), key=lambda row: -errors[row])
    assert rows_of[0] == by_error[:8]
    assert rows_of[1] == by_error[8:10] == [30, 20]
    assert near.count("nearest training molecule: 1.00") == 2
    assert f"true {errors[by_error[0]]:.4f}, predicted 0" in worst
    drawings = [b64decode(found) for found in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)', worst)]
    assert len(drawings) == 8
    assert all(b"<svg" in drawing and b"class='bond-0" in drawing for drawing in drawings)


@pytest.mark.parametrize(("num_rows", "num_lines"), [(2, 1), (10, 2)])
def test_the_mean_of_fewer_than_ten_errors_has_no_interval(tmp_path, figures, num_rows, num_lines):
    """A line for the mean of the only bin, and one for its interval."""
    write_page(value_run(tmp_path, np.linspace(0.1, 1, num_rows), inputs=SMILES))
    (axes,) = figures["error-by-distance"].axes
    assert len(axes.lines) == num_lines


@pytest.mark.usefixtures("figures")
def test_the_worst_rows_of_a_text_run_are_shown_as_text(tmp_path):
    run = scored(
        "run",
        "csv",
        {"accuracy": [0.5]},
        loss="classes",
        output_names=("red", "green", "blue"),
        input_kind="text",
        split_sizes={"train": 3, "valid": 3, "test": 6},
        seeds=(1,),
    )
    targets = {"train": np.array([[0.0], [1.0], [2.0]]), "valid": np.zeros((3, 1)), "test": np.zeros((6, 1))}
    outputs = {"valid": np.full((3, 3), 1 / 3), "test": np.tile([[0.5, 0.25, 0.25]], (6, 1))}
    outputs["test"][2] = [0.375, 0.5, 0.125]
    outputs["test"][4] = [0.125, 0.125, 0.75]
    inputs = [f"text <i>{number}</i>" for number in range(6)]
    text = write_page(write_run(tmp_path, run, targets, outputs, inputs=inputs)).read_text(encoding="utf-8")
    sections = sections_of(text)
    assert not any("molecules" in title for title in sections)
    worst = sections["Worst predicted rows, test"]
    assert "<i>" not in worst
    assert re.findall(r"text &lt;i&gt;(\d)", worst) == ["4", "2"], "rows that are predicted right are not among them"
    assert "true red (0.125), predicted blue (0.750)" in worst
    assert "--explain" not in text
    outputs["test"][[2, 4]] = [0.5, 0.25, 0.25]
    unplaced = write_run(tmp_path, run, targets, outputs, inputs=inputs, has_places=False)
    worst = sections_of(write_page(unplaced).read_text(encoding="utf-8"))["Worst predicted rows, test"]
    assert "&lt;i&gt;" not in worst


@pytest.mark.usefixtures("figures")
def test_each_label_has_its_row_on_the_page(tmp_path):
    of_label: Values = {metric: [0.625, 0.625] for metric in ("roc_auc", "average_precision", "accuracy")}
    run = labels_run(tmp_path, labels={"active": of_label, "toxic": of_label})
    text = write_page(run).read_text(encoding="utf-8")
    assert "<h2>Scores of each label, test</h2>" in text
    assert "<tr><td>toxic</td>" + 3 * '<td class="number">0.6250</td>' + "</tr>" in text


@pytest.mark.usefixtures("figures")
def test_a_page_says_which_share_of_each_third_is_inside_the_intervals(tmp_path):
    """60 test rows, of which the farthest third has errors of 3 and the others of 1; all intervals are 2 wide."""
    sizes = {"train": 1, "valid": 40, "test": 60}
    run = scored("run", "csv", {"rmse": [0.5, 0.5]}, loss="regression", output_names=("logS",), split_sizes=sizes)
    near_N = np.linspace(1, 0.41, 60)
    targets = {"train": np.ones(1), "valid": np.ones(40), "test": np.where(np.arange(60) < 40, 1.0, 3.0)}
    outputs = {split: np.zeros((sizes[split], 1)) for split in ("valid", "test")}
    columns = {split: of_split[:, None] for split, of_split in targets.items()}
    run = write_run(tmp_path, run, columns, outputs, similarity={"valid": near_N[:40], "test": near_N})
    text = write_page(run).read_text(encoding="utf-8")
    assert "fewer than 50 validation rows: <code>logS</code>" in text
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr.*?</tr>", text)]
    found = {row[0]: row[1:] for row in cells if row and row[0].startswith("Tanimoto")}
    assert found == {
        "Tanimoto similarity 1 to 0.81": ["20", "100.0 %", "83.9 % to 100.0 %", "2.0000"],
        "Tanimoto similarity 0.8 to 0.61": ["20", "100.0 %", "83.9 % to 100.0 %", "2.0000"],
        "Tanimoto similarity 0.6 to 0.41": ["20", "0.0 %", "0.0 % to 16.1 %", "2.0000"],
    }
    (tmp_path / CALIBRATION_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        write_page(run)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: `apt-get install chromium`")
def test_a_browser_shows_the_figures(page, tmp_path):
    """Nothing on the page is orange but lines of the figures."""
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    assert CHROMIUM is not None
    command = [CHROMIUM, *ALONE, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = (imread(picture)[..., :3] * 255).round()
    colour = np.array([int(RUN_COLOURS[1][i : i + 2], 16) for i in (1, 3, 5)])
    assert (np.abs(pixels - colour).max(-1) < 3).sum() > 100
