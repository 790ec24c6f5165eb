"""`exlm fill` on small checkpoints: one text, files, and what is taken for which."""

import csv
from pathlib import Path

from exlm_cli.fill.file import COLUMNS
from tests.cli.asserts import printed_by, result_of
from tests.unit.finetune.synthetic import make_pretrained

ROWS = "id,text\n1,amber [MASK] fern\n2,no mask\n3,[MASK] <mask>\n"


def test_one_text_has_a_table_or_json_and_a_file_where_one_is_asked_for(run_folder, capsys):
    said = printed_by(capsys, ["fill", "amber [MASK] fern", "--top", "2", "--checkpoint", "T"])
    assert [line.split()[0] for line in said.out.splitlines()[4:6]] == ["1", "2"]
    words = ["fill", "amber [MASK] fern", "--top", "2", "--checkpoint", "T", "--out", "one.csv"]
    result = result_of(capsys, *words)
    assert result["files"] == ["one.csv"]
    lines = list(csv.DictReader(Path("one.csv").read_text().splitlines()))
    assert [line["filled"] for line in lines] == [line["filled"] for line in result["fillings"]]
    assert result["fillings"][0]["probability"] > result["fillings"][1]["probability"] > 0


def test_a_file_has_its_rows_filled_and_goes_to_the_reports_of_the_run(folder, capsys):
    make_pretrained(Path("runs/pretrained"))
    Path("masks.csv").write_text(ROWS)
    result = result_of(capsys, "fill", "masks.csv", "--top", "1")
    assert (result["rows"], result["unreadable_rows"]) == (3, 1)
    (path,) = map(Path, result["files"])
    assert path == Path("runs/pretrained/report/fillings-masks.csv")
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert [(line["id"], bool(line["filled"])) for line in lines] == [("1", True), ("2", False), ("3", True)]


def test_molecules_have_the_predictions_of_a_run_beside_them(run_folder, capsys):
    Path("open.smi").write_text("C[*:1]\nOC[MASK]\n")
    words = ["fill", "open.smi", "--checkpoint", "P", "--top", "4", "--predict", "M", "--out", "out.csv"]
    assert result_of(capsys, *words)["unreadable_rows"] == 0
    lines = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    result_of(capsys, "predict", "M", "out.csv", "--smiles-column", "filled", "--out", "predicted.csv")
    predicted = list(csv.DictReader(Path("predicted.csv").read_text().splitlines()))
    names = [name for name in lines[0] if name not in ("smiles", "name", *COLUMNS)]
    assert "in_split" in names
    for line, alone in zip(lines, predicted, strict=True):
        assert [_number(line[name]) for name in names] == [_number(alone[name]) for name in names]


def _number(cell: str) -> str:
    try:
        return f"{float(cell):.3f}"
    except ValueError:
        return cell


def test_draws_and_targets_are_asked_for_by_options(run_folder, capsys):
    Path("masks.csv").write_text('text,choices\namber [MASK] fern,"birch,daisy"\namber [MASK],fern\n')
    words = ["fill", "masks.csv", "--checkpoint", "T", "--targets", "choices", "--out", "out.csv"]
    result_of(capsys, *words)
    lines = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    for cell in ("birch,daisy", "fern"):
        assert sorted(line["filling"] for line in lines if line["choices"] == cell) == cell.split(",")
    drawn = result_of(capsys, "fill", "amber [MASK] fern", "--checkpoint", "T", "--sample", "5", "--seed", "2")
    assert len({line["filled"] for line in drawn["fillings"]}) == 5
    assert drawn["way"].startswith("drawn with seed 2")
