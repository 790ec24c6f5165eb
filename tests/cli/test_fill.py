"""`exlm fill` on small checkpoints: one text, files, and what is taken for which."""

import csv
from pathlib import Path

from tests.cli.asserts import printed_by, result_of
from tests.unit.finetune.synthetic import make_pretrained

ROWS = "id,text\n1,amber [MASK] fern\n2,no mask\n3,[MASK] <mask>\n"


def test_one_text_has_a_table_or_json_and_a_file_where_one_is_asked_for(run_folder, capsys):
    said = printed_by(capsys, ["fill", "amber [MASK] fern", "--top", "2", "--checkpoint", "T"])
    assert [line.split()[0] for line in said.out.splitlines()[4:]] == ["1", "2"]
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
