"""SQuAD files of the official layout, written here by hand, and everything that can be wrong with one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.data.rows.records import Record
from exlm_cli.errors import DataError
from exlm_cli.tasks.squad.files import SquadQuestion, read_squad_json, read_squad_rows

CONTEXT = "Moss grows on the north side. Ferns grow below."


def question(name: str = "q1", **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "question": "Where does moss grow?",
        "answers": [{"text": "north side", "answer_start": 18}],
        "is_impossible": False,
        **changes,
    }


def document(*questions: dict[str, Any], context: str = CONTEXT) -> dict[str, Any]:
    paragraphs = [{"context": context, "qas": list(questions)}]
    return {"version": "v2.0", "data": [{"title": "Moss", "paragraphs": paragraphs}]}


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_questions_come_in_order_with_their_answers(tmp_path):
    none = question(
        "q2", question=" Who planted it? ", answers=[], is_impossible=True, plausible_answers=[{"text": "x"}]
    )
    found = read_squad_json(write(tmp_path / "dev-v2.0.json", document(question(), none)))
    assert found.skipped == []
    assert found.questions == [
        SquadQuestion(0, "q1", "Moss", CONTEXT, "Where does moss grow?", (("north side", 18),)),
        SquadQuestion(1, "q2", "Moss", CONTEXT, "Who planted it?", ()),
    ]
    assert found.questions[0].golds == ("north side",)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id": "q1"}, "another question has this id"),
        ({"question": " "}, "its question is empty"),
        ({"question": "half \ud83d?"}, "its question contains a lone surrogate"),
        ({"answers": []}, "`is_impossible` is false, but it has 0 answers"),
        ({"is_impossible": True}, "`is_impossible` is true, but it has 1 answer"),
        ({"answers": [{"text": " ", "answer_start": 4}]}, "an answer is empty"),
        ({"answers": [{"text": "south side", "answer_start": 18}]}, "is not at `answer_start` 18"),
        ({"answers": [{"text": "m\ud83d", "answer_start": 0}]}, "m\\ud83d"),
    ],
)
def test_a_question_that_cannot_be_used_is_named(tmp_path, changes, problem):
    path = write(tmp_path / "a.json", document(question(), question(**{"id": "q2"} | changes), question("q3")))
    found = read_squad_json(path)
    assert [(q.row, q.id) for q in found.questions] == [(0, "q1"), (2, "q3")]
    (skipped,) = map(str, found.skipped)
    assert skipped.startswith("article `Moss`, paragraph 1, question `q")
    assert problem in skipped


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in question().items() if name != key}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (document(question(), _without("answers")), "question `q1`"),
        (document(question(id=5)), "`data.0.paragraphs.0.qas.0.id`: "),
        ({"data": []}, "no question"),
    ],
)
def test_another_layout_is_refused_with_its_place(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: {re.escape(message)}") as caught:
        read_squad_json(path)
    assert "train-v2.0.json" in caught.value.hint


def records(*rows: dict[str, Any]) -> list[Record]:
    return [Record("x", number, row, has_lines=False) for number, row in enumerate(rows, start=1)]


def flat(name: str = "q1", **changes: Any) -> dict[str, Any]:
    answers = {"text": ["north side"], "answer_start": [18]}
    row = {"id": name, "title": "Moss", "context": CONTEXT, "question": "Where does moss grow?", "answers": answers}
    return row | changes


def test_flat_rows_are_the_same_questions_and_name_what_is_wrong(tmp_path):
    nested = read_squad_json(write(tmp_path / "a.json", document(question())))
    wrong = flat("q2", answers={"text": ["Moss"], "answer_start": [3]})
    found = read_squad_rows("hub:x@train", records(flat(), wrong))
    assert found.questions == nested.questions
    (skipped,) = found.skipped
    assert skipped[:3] == ("hub:x@train", "2, question `q2`", "record 2, question `q2`")


def test_flat_rows_of_another_layout_are_refused():
    uneven = flat("q2", answers={"text": ["Moss"], "answer_start": []})
    for rows, message in (
        ([flat(answers=None)], "x, record 1: `answers`"),
        ([flat(), uneven], "x, record 2: .*`answer"),
    ):
        with pytest.raises(DataError, match=f"^{message}"):
            read_squad_rows("x", records(*rows))


def test_answers_may_be_missing_where_none_are_needed(tmp_path):
    """A test set without its answers still says `is_impossible: false`."""
    bare = [_without("answers") | {"id": name, "is_impossible": name == "q2"} for name in ("q2", "q3")]
    path = write(tmp_path / "test.json", document(question(), *bare))
    found = read_squad_json(path, needs_answers=False)
    assert [q.golds for q in found.questions] == [("north side",), (), ()]
    assert (found.has_answers, found.skipped) == (False, [])
    assert read_squad_json(write(tmp_path / "dev.json", document(question())), needs_answers=False).has_answers
