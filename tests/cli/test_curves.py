"""`exlm curves`: both files come out, runs that cannot be drawn are refused by name."""

import json
import re
from pathlib import Path

import pytest

from exlm_cli.cli.app import main


def _run(folder: Path, losses: list[float]) -> Path:
    folder.mkdir()
    rows = [{"kind": "valid", "step": step, "loss": loss} for step, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_curves_of_two_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(_run(tmp_path / name, [3.0, 2.0, 1.5])) for name in ("exlm", "mlm")]
    assert main(["curves", *runs, "--json"]) == 0
    files = [Path(f) for f in json.loads(capsys.readouterr().out)["files"]]
    assert [f.name for f in files] == ["curves.png", "curves.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert files[0].parent == tmp_path / "exlm" / "report"


def test_a_folder_without_metrics_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curves", str(tmp_path)]) == 2
    assert f"error: {tmp_path}/metrics.jsonl: not readable" in capsys.readouterr().err


def test_a_run_without_rows_has_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curves", str(_run(tmp_path / "empty", []))]) == 2
    assert "error: nothing to draw" in capsys.readouterr().err


def _lines(svg: Path) -> list[str]:
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


def test_runs_of_one_name_are_told_apart_by_more_of_their_paths(tmp_path: Path) -> None:
    for name in ("k1", "k2"):
        (tmp_path / name).mkdir()
    runs = [str(_run(tmp_path / name / "pretrain", [3.0, 2.0])) for name in ("k1", "k2")]
    assert main(["curves", *runs, "--out", str(tmp_path / "figures" / "both")]) == 0
    assert {"k1/pretrain", "k2/pretrain"} <= set(_lines(tmp_path / "figures" / "both.svg"))


def test_a_run_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(_run(tmp_path / "run", [3.0, 2.0]))
    assert main(["curves", run, run]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run} is given twice\n")


@pytest.mark.parametrize(
    ("out", "stem"), [("fig-p0.15", "fig-p0.15"), ("fig.png", "fig"), ("fig.SVG", "fig"), ("fig.v2.svg", "fig.v2")]
)
def test_a_dot_in_the_name_stays(tmp_path: Path, out: str, stem: str) -> None:
    run = str(_run(tmp_path / "run", [3.0, 2.0]))
    assert main(["curves", run, "--out", str(tmp_path / "figures" / out)]) == 0
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [f"{stem}.png", f"{stem}.svg"]


@pytest.mark.parametrize("out", [".", "there", "there/", "new/", "new.dir/"])
def test_a_directory_takes_them_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    run = str(_run(tmp_path / "run", [3.0, 2.0]))
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["curves", run, "--out", out]) == 0
    assert {path.name for path in Path(out).iterdir() if path.is_file()} == {"curves.png", "curves.svg"}
    assert {path.name for path in tmp_path.iterdir()} - before <= {"curves.png", "curves.svg", out.rstrip("/")}


@pytest.mark.parametrize(
    ("out", "error"),
    [
        ("cv.pdf", "`--out cv.pdf`: curves are drawn as .png and .svg, not as .pdf\n\nhint: `--out cv` writes both"),
        ("new/cv.Html", "`--out new/cv.Html`: curves are drawn as .png and .svg, not as .Html\n\n"
         "hint: `--out new/cv` writes both"),
        ("", "`--out` is empty\n\nhint: give the pictures a name, or leave it out: they go to report/ of the run"),
    ],
)  # fmt: skip
def test_a_name_that_no_picture_can_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str, error: str
) -> None:
    run = str(_run(tmp_path / "run", [3.0, 2.0]))
    monkeypatch.chdir(tmp_path)
    assert main(["curves", run, "--out", out]) == 2
    assert capsys.readouterr().err == f"error: {error}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
