"""The page of a run holds its scores, verdict and figures, needs no other file, and a browser shows it."""

import re
import shlex
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.files import write_json
from exlm_cli.finetune.calibration import CALIBRATION_FILE, calibrate_run
from exlm_cli.report.page import write_page
from exlm_cli.report.style import RUN_COLOURS
from exlm_cli.run_dir import update_run_json
from exlm_cli.tasks.base import write_outputs
from tests.unit.report.results import Values, at_folder, scored

CHROMIUM = shutil.which("chromium")
ALONE = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1100,1600",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a run of two seeds and two labels, one of which is called like a tag."""
    folder = tmp_path_factory.mktemp("page") / "<my run>"
    names = ("active", "<b>toxic</b>")
    notes = ("cut `a<b` of the rows",)
    run = scored(
        "run", "csv", {"roc_auc": [0.7, 0.8]}, output_names=names, notes=notes, verdict=("The model is <better>.",)
    )
    folder.mkdir()
    update_run_json(folder, {"command": "finetune", "device": "cpu"})
    rng = np.random.default_rng(0)
    for split in ("valid", "test"):
        write_outputs(
            folder / f"targets-{split}.csv", range(40), names, list(rng.integers(0, 2, (40, 2)).astype(float))
        )
        for seed in (1, 2):
            cell = folder / f"cells/single/split-0/seed-{seed}"
            cell.mkdir(parents=True, exist_ok=True)
            write_outputs(cell / f"predictions-{split}.csv", range(40), names, list(rng.random((40, 2))))
    write_json(folder / CALIBRATION_FILE, calibrate_run(folder, run.results))
    return write_page(at_folder(run, folder))


def test_a_page_holds_everything_and_names_no_other_file(page):
    text = page.read_text(encoding="utf-8")
    assert all(said in text for said in ("The model is &lt;better&gt;.", "roc_auc", "<code>a&lt;b</code>"))
    assert f"exlm predict {shlex.quote(str(page.parent))} FILE\n" in unescape(text)
    assert not re.search(r"<b>|<script|https?://|<link", text)
    assert "<title>csv: &lt;my run&gt;</title>" in text
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert len(sources) == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)


@pytest.mark.parametrize(
    ("changes", "is_suggested"),
    [
        ({"split": "random"}, True),
        ({"split": "scaffold-balanced"}, True),
        ({"split": "scaffold"}, False),
        ({"split": "random", "split_seeds": (0, 1)}, False),
    ],
)
def test_more_splits_are_suggested_where_a_seed_draws_them(tmp_path, monkeypatch, changes, is_suggested):
    monkeypatch.setattr("exlm_cli.report.page.draw_runs", lambda *_: [])
    update_run_json(tmp_path, {"command": "finetune", "device": "cpu"})
    run = scored("run", "csv", {"roc_auc": [0.7, 0.8]}, **changes)
    text = unescape(write_page(at_folder(run, tmp_path)).read_text(encoding="utf-8"))
    assert f"exlm eval {tmp_path}" in text
    assert (f"exlm finetune --resume {tmp_path} --set num_replicates=5" in text) == is_suggested


def test_each_label_has_its_row_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr("exlm_cli.report.page.draw_runs", lambda *_: [])
    update_run_json(tmp_path, {"command": "finetune", "device": "cpu"})
    of_label: Values = {metric: [0.625] for metric in ("roc_auc", "average_precision", "accuracy")}
    run = scored("run", "csv", {"roc_auc": [0.7]}, labels={"active": of_label, "toxic": of_label})
    text = write_page(at_folder(run, tmp_path)).read_text(encoding="utf-8")
    assert "<h2>Scores of each label, test</h2>" in text
    assert "<tr><td>toxic</td>" + 3 * '<td class="number">0.6250</td>' + "</tr>" in text


def test_a_page_says_which_share_of_each_third_is_inside_the_intervals(tmp_path, monkeypatch):
    """60 test rows, of which the farthest third has errors of 3 and the others of 1; all intervals are 2 wide."""
    monkeypatch.setattr("exlm_cli.report.page.draw_runs", lambda *_: [])
    update_run_json(tmp_path, {"command": "finetune", "device": "cpu"})
    run = scored("run", "csv", {"rmse": [0.5, 0.5]}, loss="regression", output_names=("logS",))
    near_N = np.linspace(1, 0.41, 60)
    parts = {"valid": np.ones(40), "test": np.where(np.arange(60) < 40, 1.0, 3.0)}
    for split, values in parts.items():
        write_outputs(tmp_path / f"targets-{split}.csv", range(len(values)), ["logS"], list(values[:, None]))
        for seed in (1, 2):
            cell = tmp_path / f"cells/single/split-0/seed-{seed}"
            cell.mkdir(parents=True, exist_ok=True)
            outputs = list(np.zeros((len(values), 1)))
            write_outputs(cell / f"predictions-{split}.csv", range(len(values)), ["logS"], outputs)
    calibration = calibrate_run(tmp_path, run.results, {"valid": near_N[:40], "test": near_N})
    write_json(tmp_path / CALIBRATION_FILE, calibration)
    text = write_page(at_folder(run, tmp_path)).read_text(encoding="utf-8")
    assert "<h2>Intervals of 90 %, test</h2>" in text
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
        write_page(at_folder(run, tmp_path))


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
