"""`exlm curves`: where both files go. Its errors are in golden/curves.txt."""

import json
from pathlib import Path

import pytest

from tests.cli.asserts import printed_by, result_of


@pytest.fixture(autouse=True)
def _blank_figures() -> None:
    """Draw here, whatever other tests of commands do."""


def make_run(path: Path) -> str:
    path.mkdir(parents=True)
    rows = [{"kind": "valid", "step": step, "loss": loss} for step, loss in enumerate((3.0, 2.0))]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_curves_of_two_runs_go_to_the_report_of_the_first(folder, capsys):
    runs = [make_run(folder / name / "pretrain") for name in ("k1", "k2")]
    files = [Path(file) for file in result_of(capsys, "curves", *runs)["files"]]
    assert files == [folder / f"k1/pretrain/report/curves.{suffix}" for suffix in ("png", "svg")]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert all(f"<!-- {name}/pretrain -->" in files[1].read_text() for name in ("k1", "k2"))


@pytest.mark.parametrize(
    ("out", "stem"),
    [
        ("new/fig-p0.15", "new/fig-p0.15"), ("fig.v2.SVG", "fig.v2"), ("there", "there/curves"),
        ("new.dir/", "new.dir/curves"),
    ],
)  # fmt: skip
def test_out_is_a_name_whose_dots_stay_or_a_directory(folder, capsys, out, stem):
    (folder / "there").mkdir()
    make_run(folder / "run")
    assert printed_by(capsys, ["curves", "run", "--out", out]).out == f"wrote {stem}.png\nwrote {stem}.svg\n"
    assert (folder / f"{stem}.png").is_file()
    assert (folder / f"{stem}.svg").is_file()
