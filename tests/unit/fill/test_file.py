"""Tables of fillings: rows in order with their own columns, as each text by itself; all formats; what is refused."""

import csv
import math
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import exlm_cli
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.fill.engine import FillSettings
from exlm_cli.fill.file import fill_file, score_file
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder
from tests.unit.finetune.synthetic import make_pretrained

TEXTS = ["amber [MASK] fern", "no mask in this row", "[MASK] [MASK] daisy", "one <mask> of these"]
MASKS = "id,text,rank\n" + "".join(f"{number},{text},x\n" for number, text in enumerate(TEXTS, start=1))
"""As `masks.csv` of the faults, with a column of a name that ours has."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> exlm_cli.Run:
    return exlm_cli.load(make_pretrained(tmp_path_factory.mktemp("fill") / "run"), device="cpu")


def _fill(run: exlm_cli.Run, path: Path, **options) -> tuple[list[dict[str, str]], tuple[str, ...]]:
    out = path.with_name("out.csv")
    settings = FillSettings(top=3)
    done = fill_file(
        run.pretrained, path, out, folder=path.parent, settings=settings, progress=SilentProgress(), **options
    )
    assert (done.files, done.num_rows) == ((out,), len(TEXTS))
    return list(csv.DictReader(out.read_text().splitlines())), done.notes


def test_rows_keep_their_order_and_columns_and_are_filled_as_each_by_itself(run, tmp_path):
    path = tmp_path / "masks.csv"
    path.write_text(MASKS)
    lines, notes = _fill(run, path)
    assert [*lines[0]] == [
        "id", "text", "rank", "filling", "filled", "probability", "probability_alone", "proven", "problem"
    ]  # fmt: skip
    assert [line["id"] for line in lines] == ["1"] * 3 + ["2"] + ["3"] * 3 + ["4"] * 3
    assert [line["rank"] for line in lines] == ["1", "2", "3", "", "1", "2", "3", "1", "2", "3"]
    assert lines[3]["problem"] == "there is no [MASK] in 'no mask in this row'"
    assert "the result replaces the table's own columns `rank`" in notes
    for number, text in enumerate(TEXTS, start=1):
        mine = [line for line in lines if line["id"] == str(number) and not line["problem"]]
        if not mine:
            continue
        one = run.fill(text, num_fillings=3)
        assert [line["filled"] for line in mine] == [filling.text for filling in one.n_best.fillings]
        shares = [one.share(filling) for filling in one.n_best.fillings]
        assert [float(line["probability"]) for line in mine] == pytest.approx(shares, rel=1e-4)
        alone = run.fill(text).guess
        if mine[0]["filled"] == alone.filling.text:
            assert float(mine[0]["probability_alone"]) == pytest.approx(alone.prob_independent, rel=1e-4)


@pytest.mark.parametrize("suffix", [".tsv", ".parquet", ".txt"])
def test_all_formats_give_the_same_fillings(run, tmp_path, suffix):
    (tmp_path / "masks.csv").write_text(MASKS)
    wanted, _ = _fill(run, tmp_path / "masks.csv")
    path = tmp_path / f"masks{suffix}"
    if suffix == ".parquet":
        table = {"id": [1, 2, 3, 4], "text": TEXTS, "weight": [0.5, None, 1.0, 2.0]}
        pyarrow.parquet.write_table(pyarrow.table(table), path)
    else:
        path.write_text(MASKS.replace(",", "\t") if suffix == ".tsv" else "\n".join(TEXTS))
    lines, _ = _fill(run, path)
    assert [line["filled"] for line in lines] == [line["filled"] for line in wanted]
    if suffix == ".parquet":
        assert [(line["id"], line["weight"]) for line in lines[3:5]] == [("2", ""), ("3", "1.0")]


def test_what_is_to_be_said_of_rows_names_their_lines(run, tmp_path):
    path = tmp_path / "masks.csv"
    path.write_text("text\n" + "amber [MASK]\n" + f"{'amber fern ' * 14}[MASK]\n" * 2 + "x\n")
    _, notes = _fill(run, path)
    way, note = notes
    assert way == "filled all masks of a row jointly, in one pass"
    assert note.startswith("longer than the ")
    assert note.endswith(": lines 3, 4")


def test_scores_of_fillings_give_their_probabilities_back(run, tmp_path):
    path = tmp_path / "masks.csv"
    path.write_text(MASKS)
    lines, _ = _fill(run, path)
    done = score_file(run.pretrained, tmp_path / "out.csv", None, folder=tmp_path, progress=SilentProgress())
    assert (done.num_rows, done.num_unreadable) == (len(lines), 0)
    scores = list(csv.DictReader((tmp_path / "scores-out.csv").read_text().splitlines()))
    for line, score in zip(lines, scores, strict=True):
        assert (line["id"], line["filling"]) == (score["id"], score["filling"])
        if line["filling"] and "[" not in line["filling"]:
            assert float(score["log_probability"]) == pytest.approx(math.log(float(line["probability"])), abs=1e-4)
    texts = [line["filled"] for line in lines if line["filled"]]
    found = run.score(np.array([*texts, "x [MASK]"]))
    assert found.log_probs[:-1] == pytest.approx([run.score(text) for text in texts], abs=1e-3)
    assert np.isnan(found.log_probs[-1])
    assert "has masks" in found.problems[-1]


def test_an_interrupted_or_impossible_file_leaves_nothing(run, tmp_path):
    path = tmp_path / "masks.csv"
    path.write_text(MASKS)

    class Stopping(Recorder):
        def bar(self, label, total, *, done=0):
            raise KeyboardInterrupt

    ways = {"settings": FillSettings(), "folder": tmp_path / "new"}
    with pytest.raises(KeyboardInterrupt):
        fill_file(run.pretrained, path, None, progress=Stopping(), **ways)
    for out, what in ((path, "overwrite the input"), (tmp_path / "a.txt", "are a .csv file")):
        with pytest.raises(ConfigError, match=what):
            fill_file(run.pretrained, path, out, progress=SilentProgress(), **ways)
    with pytest.raises(DataError, match="no column `word`"):
        fill_file(run.pretrained, path, None, columns=("word",), progress=SilentProgress(), **ways)
    assert [each.name for each in tmp_path.iterdir()] == ["masks.csv"]
