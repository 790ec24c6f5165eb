"""SQuAD files of the official layout, written by hand, and everything that can be wrong with one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.data.rows.records import Record
from exlm_cli.errors import DataError
from exlm_cli.tasks.squad.files import SquadQuestion, read_squad_json, read_squad_rows
from tests.unit.tasks.squad.test_task import PARAGRAPHS, document

CLOCKS = PARAGRAPHS["Clocks"]


def changed(path: Path, **changes: Any) -> Path:
    """Write the three questions on clocks, with other values of the second; None: without the key."""
    content = document("Clocks")
    (paragraph,) = content["data"][0]["paragraphs"]
    qa = paragraph["qas"][1] | changes
    paragraph["qas"][1] = {name: value for name, value in qa.items() if value is not None}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_questions_come_in_order_with_their_answers(tmp_path):
    path = changed(tmp_path / "a.json", question=" What does it show? ", plausible_answers=[{"text": "x"}])
    found = read_squad_json(path)
    assert found.skipped == []
    assert found.questions == [
        SquadQuestion(0, "Clocks-0", "Clocks", CLOCKS, "When was it built?", (("1424", 37),)),
        SquadQuestion(1, "Clocks-1", "Clocks", CLOCKS, "What does it show?", (("the moon", 52),)),
        SquadQuestion(2, "Clocks-2", "Clocks", CLOCKS, "Who paid for it?", ()),
    ]
    assert found.questions[0].golds == ("1424",)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id": "Clocks-0"}, "another question has this id"),
        ({"question": " "}, "its question is empty"),
        ({"question": "half \ud83d?"}, "its question contains a lone surrogate"),
        ({"answers": []}, "`is_impossible` is false, but it has 0 answers"),
        ({"is_impossible": True}, "`is_impossible` is true, but it has 1 answer"),
        ({"answers": [{"text": " ", "answer_start": 3}]}, "an answer is empty"),
        ({"answers": [{"text": "the sun", "answer_start": 52}]}, "is not at `answer_start` 52; there is `the moo`"),
        ({"answers": [{"text": "m\ud83d", "answer_start": 0}]}, "m\\ud83d"),
    ],
)
def test_a_question_that_cannot_be_used_is_named(tmp_path, changes, problem):
    found = read_squad_json(changed(tmp_path / "a.json", **changes))
    assert [(q.row, q.id) for q in found.questions] == [(0, "Clocks-0"), (2, "Clocks-2")]
    (skipped,) = map(str, found.skipped)
    assert skipped.startswith("article `Clocks`, paragraph 1, question `Clocks-")
    assert problem in skipped


def test_another_layout_is_refused_with_its_place(tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text('{"data": []}')
    for path, message in (
        (changed(tmp_path / "a.json", answers=None), "question `Clocks-1`"),
        (changed(tmp_path / "b.json", id=5), "`data.0.paragraphs.0.qas.1.id`: "),
        (empty, "no question"),
    ):
        with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: {re.escape(message)}") as caught:
            read_squad_json(path)
        assert "train-v2.0.json" in caught.value.hint


def test_flat_rows_are_the_same_questions_and_name_what_is_wrong(tmp_path):
    def read(*answers: Any) -> Any:
        row = {"id": "Clocks-0", "title": "Clocks", "context": CLOCKS, "question": "When was it built?"}
        rows = [{**row, "id": f"Clocks-{number}", "answers": given} for number, given in enumerate(answers)]
        return read_squad_rows("x", [Record("x", n, one, has_lines=False) for n, one in enumerate(rows, start=1)])

    good = {"text": ["1424"], "answer_start": [37]}
    found = read(good, {"text": ["Moss"], "answer_start": [3]})
    assert found.questions == read_squad_json(changed(tmp_path / "a.json")).questions[:1]
    (skipped,) = found.skipped
    assert skipped[:3] == ("x", "2, question `Clocks-1`", "record 2, question `Clocks-1`")
    for answers, message in (
        (None, "x, record 2: `answers`"),
        ({**good, "answer_start": []}, "x, record 2: .*`answer"),
    ):
        with pytest.raises(DataError, match=f"^{message}"):
            read(good, answers)


def test_answers_may_be_missing_where_none_are_needed(tmp_path):
    """A test set without its answers still says `is_impossible: false`."""
    found = read_squad_json(changed(tmp_path / "test.json", answers=None), needs_answers=False)
    assert [q.golds for q in found.questions] == [("1424",), (), ()]
    assert (found.has_answers, found.skipped) == (False, [])
    assert read_squad_json(changed(tmp_path / "dev.json"), needs_answers=False).has_answers
