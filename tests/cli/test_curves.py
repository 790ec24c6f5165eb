"""`exlm curves`: where both files go. Its errors are in golden/curves.txt."""

import json
from pathlib import Path

from tests.cli.asserts import printed_by, result_of


def make_run(path: Path) -> str:
    path.mkdir(parents=True)
    rows = [{"kind": "valid", "step": step, "loss": loss} for step, loss in enumerate((3.0, 2.0))]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_curves_go_to_the_report_of_the_first_run_or_to_a_name_whose_dots_stay_or_a_directory(folder, capsys):
    runs = [make_run(folder / name / "pretrain") for name in ("k1", "k2")]
    files = [folder / f"k1/pretrain/report/curves.{suffix}" for suffix in ("png", "svg")]
    assert result_of(capsys, "curves", *runs) == {"files": list(map(str, files))}
    assert all(file.is_file() for file in files)
    (folder / "there").mkdir()
    stems = {"new/fig-p0.15": "new/fig-p0.15", "fig.v2.SVG": "fig.v2"}
    stems |= {"there": "there/curves", "new.dir/": "new.dir/curves"}
    for out, stem in stems.items():
        assert printed_by(capsys, ["curves", runs[0], "--out", out]).out == f"wrote {stem}.png\nwrote {stem}.svg\n"
