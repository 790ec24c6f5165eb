"""`exlm fill` on small checkpoints: one text, files, what options ask for; `tests/unit/fill` checks the fillings."""

import csv
from pathlib import Path
from typing import Any

from exlm_cli.fill.file import COLUMNS
from tests.cli.asserts import printed_by, result_of
from tests.unit.finetune.synthetic import make_pretrained


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def test_one_text_has_a_table_or_json_and_a_file_where_one_is_asked_for(run_folder, capsys):
    words = ["fill", "amber [MASK] fern", "--checkpoint", "T"]
    said = printed_by(capsys, [*words, "--top", "2"])
    assert [line.split()[0] for line in said.out.splitlines()[4:6]] == ["1", "2"]
    result = result_of(capsys, *words, "--top", "2", "--out", "one.csv")
    assert result["files"] == ["one.csv"]
    assert [line["filled"] for line in lines_of("one.csv")] == [line["filled"] for line in result["fillings"]]
    assert result["fillings"][0]["probability"] > result["fillings"][1]["probability"] > 0
    drawn = result_of(capsys, *words, "--sample", "5", "--seed", "2")
    assert len({line["filled"] for line in drawn["fillings"]}) == 5
    assert drawn["way"].startswith("drawn with seed 2")
    assert result_of(capsys, "fill", "amber fern", "--checkpoint", "T", "--score")["pseudo_log_likelihood"] < 0


def test_a_file_has_its_rows_filled_and_goes_to_the_reports_of_the_run(folder, capsys):
    make_pretrained(Path("runs/pretrained"))
    Path("masks.csv").write_text('id,text,of\n1,amber [MASK] fern,"birch,daisy"\n2,no mask,fern\n3,<mask>,fern\n')
    result = result_of(capsys, "fill", "masks.csv", "--targets", "of")
    assert (result["rows"], result["unreadable_rows"]) == (3, 1)
    assert result["files"] == ["runs/pretrained/report/fillings-masks.csv"]
    lines = lines_of(*result["files"])
    assert [line["id"] for line in lines] == ["1", "1", "2", "3"]
    assert sorted(line["filling"] for line in lines[:2]) == ["birch", "daisy"]


def test_molecules_have_the_predictions_of_a_run_beside_them(run_folder, capsys):
    Path("open.smi").write_text("C[*:1]\nOC[MASK]\n")
    words = ["fill", "open.smi", "--checkpoint", "P", "--top", "4", "--predict", "M", "--out", "out.csv"]
    assert result_of(capsys, *words)["unreadable_rows"] == 0
    result_of(capsys, "predict", "M", "out.csv", "--smiles-column", "filled", "--out", "predicted.csv")
    names = [name for name in lines_of("out.csv")[0] if name not in ("smiles", "name", *COLUMNS)]
    assert "in_split" in names
    for line, alone in zip(lines_of("out.csv"), lines_of("predicted.csv"), strict=True):
        assert [_number(line[name]) for name in names] == [_number(alone[name]) for name in names]


def _number(cell: str) -> str:
    try:
        return f"{float(cell):.3f}"
    except ValueError:
        return cell
