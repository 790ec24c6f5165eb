"""Tables of fillings: rows in order with their own columns, as each text by itself; words that may stand at masks."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

import exlm_cli
from exlm_cli.fill.engine import FillSettings
from exlm_cli.fill.file import fill_file, read_targets, score_file
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder
from tests.unit.finetune.synthetic import make_pretrained

TEXTS = ["amber [MASK] fern", "no mask in this row", "[MASK] [MASK] daisy", "one <mask> of these"]
MASKS = "id,text,rank\n" + "".join(f"{number},{text},x\n" for number, text in enumerate(TEXTS, start=1))
"""As `masks.csv` of the faults, with a column of a name that ours has."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> exlm_cli.Run:
    return exlm_cli.load(make_pretrained(tmp_path_factory.mktemp("fill") / "run"), device="cpu")


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    path = tmp_path / "masks.csv"
    path.write_text(MASKS)
    return path


def _fill(run: exlm_cli.Run, path: Path, **options) -> tuple[list[dict[str, str]], tuple[str, ...]]:
    out = path.with_name("out.csv")
    settings = FillSettings(top=3)
    done = fill_file(
        run.pretrained, path, out, folder=path.parent, settings=settings, progress=SilentProgress(), **options
    )
    assert (done.files, done.num_rows) == ((out,), len(TEXTS))
    return list(csv.DictReader(out.read_text().splitlines())), done.notes


def test_rows_keep_their_order_and_columns_and_are_filled_as_each_by_itself(run, masks):
    lines, notes = _fill(run, masks)
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


def test_a_list_of_texts_is_filled_as_a_table_is_and_notes_name_lines(run, masks, tmp_path):
    wanted, _ = _fill(run, masks)
    path = tmp_path / "masks.txt"
    path.write_text("\n".join(TEXTS))
    assert [line["filled"] for line in _fill(run, path)[0]] == [line["filled"] for line in wanted]
    path.write_text("amber [MASK]\n" + f"{'amber fern ' * 14}[MASK]\n" * 2 + "x\n")
    way, note = _fill(run, path)[1]
    assert way == "filled all masks of a row jointly, in one pass"
    assert note.startswith("longer than the ")
    assert note.endswith(": lines 2, 3")


def test_targets_are_a_list_or_a_file_of_words(tmp_path):
    (tmp_path / "words.txt").write_text("birch\n\nfern\n")
    (tmp_path / "words.csv").write_text("id,text\n1,birch\n2,fern\n")
    for given in ("birch, ,fern", "words.txt", "words.csv"):
        assert read_targets(str(tmp_path / given) if "." in given else given) == ["birch", "fern"]


def test_scores_of_fillings_give_their_probabilities_back(run, masks, tmp_path):
    lines, _ = _fill(run, masks)
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


def test_an_interrupted_file_leaves_nothing(run, masks, tmp_path):
    class Stopping(Recorder):
        def bar(self, label, total, *, done=0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_file(run.pretrained, masks, None, folder=tmp_path / "new", settings=FillSettings(), progress=Stopping())
    assert [each.name for each in tmp_path.iterdir()] == ["masks.csv"]
