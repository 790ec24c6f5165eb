"""Reader of SQuAD 2.0 questions: the official JSON, or flat rows as the Hub has them; every answer is checked."""

import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from exlm_cli.data.rows.decode import beyond_limits, open_file
from exlm_cli.data.rows.records import Record, SkippedRow
from exlm_cli.errors import DataError

_LAYOUT_HINT = "the layout is that of the official train-v2.0.json: data, paragraphs, context, qas, id, answers"


@dataclass(frozen=True)
class SquadQuestion:
    """One question on one paragraph.

    Attributes:
        row: Number in the file, counted from 0.
        id: As in the file.
        title: Title of the article.
        context: The paragraph.
        text: The question.
        answers: Gold answers with the character they begin at; none if the paragraph has no answer.
    """

    row: int
    id: str
    title: str
    context: str
    text: str
    answers: tuple[tuple[str, int], ...]

    @property
    def golds(self) -> tuple[str, ...]:
        """Texts of the answers."""
        return tuple(text for text, _ in self.answers)


@dataclass
class SquadFile:
    """Questions of one file or Hub split.

    Attributes:
        source: File or Hub split.
        questions: Questions that can be used.
        skipped: The other questions.
        has_answers: Whether every question has a list of answers, empty or not.
    """

    source: str
    questions: list[SquadQuestion] = field(default_factory=list)
    skipped: list[SkippedRow] = field(default_factory=list)
    has_answers: bool = True


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Answer(_Model):
    text: str
    answer_start: int


class _Question(_Model):
    id: str
    question: str
    answers: list[_Answer] | None = None
    is_impossible: bool | None = None


class _Paragraph(_Model):
    context: str
    qas: list[_Question]


class _Article(_Model):
    title: str
    paragraphs: list[_Paragraph]


class _Document(_Model):
    data: list[_Article]


class _FlatAnswers(_Model):
    text: list[str]
    answer_start: list[int]


class _FlatRow(_Model):
    id: str
    title: str
    context: str
    question: str
    answers: _FlatAnswers


_DOCUMENT = TypeAdapter(_Document)
_FLAT_ROW = TypeAdapter(_FlatRow)


def read_squad_json(path: Path, *, needs_answers: bool = True) -> SquadFile:
    """Read an official `train-v2.0.json` or `dev-v2.0.json`, also .gz or .xz.

    Args:
        path: The file.
        needs_answers: If false, a question may lack `answers`, as in a test set.

    Raises:
        DataError: The file cannot be read, is not JSON, or does not have the official layout.
    """
    with open_file(path) as file:
        content = _parse(path, file)
    try:
        document = _DOCUMENT.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path}: {_place(first['loc'])}: {_said(first['msg'])}", _LAYOUT_HINT) from error
    collected = SquadFile(str(path))
    checks = _Checks(collected)
    for article_number, article in enumerate(document.data):
        for number, paragraph in enumerate(article.paragraphs):
            for question_number, question in enumerate(paragraph.qas):
                if question.answers is None and needs_answers:
                    place = ("data", article_number, "paragraphs", number, "qas", question_number, "answers")
                    raise DataError(f"{path}: {_place(place)}: Field required", _LAYOUT_HINT)
                collected.has_answers &= question.answers is not None
                answers = tuple((answer.text, answer.answer_start) for answer in question.answers or ())
                where = f"article `{article.title}`, paragraph {number + 1}, question `{question.id}`"
                checks.add(
                    where, question.id, article.title, paragraph.context, question.question, answers,
                    None if question.answers is None else question.is_impossible,
                )  # fmt: skip
    return _not_empty(collected)


def read_squad_rows(source: str, records: Iterable[Record]) -> SquadFile:
    """Read flat rows with `id`, `title`, `context`, `question` and `answers`, as the Hub has them.

    Raises:
        DataError: A row does not have that layout.
    """
    collected = SquadFile(source)
    checks = _Checks(collected)
    for record in records:
        try:
            row = _FLAT_ROW.validate_python(record.values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise DataError(f"{record.where}: `{key}`: {_said(first['msg'])}") from error
        texts, starts = row.answers.text, row.answers.answer_start
        if len(texts) != len(starts):
            raise DataError(f"{record.where}: {len(texts)} answer texts, but {len(starts)} values of `answer_start`")
        where = f"record {record.number}, question `{row.id}`"
        checks.add(where, row.id, row.title, row.context, row.question, tuple(zip(texts, starts, strict=True)), None)
    return _not_empty(collected)


def _parse(path: Path, file: io.BufferedReader) -> Any:
    try:
        return json.load(file)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: not JSON: {error.msg} at line {error.lineno} column {error.colno}", _LAYOUT_HINT
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {beyond_limits(error)}", _LAYOUT_HINT) from error


def _place(loc: tuple[int | str, ...]) -> str:
    """Return a place in the document in words: ("data", 0, "paragraphs", 2) -> "article 1, paragraph 3"."""
    names = {"data": "article", "paragraphs": "paragraph", "qas": "question", "answers": "answer"}
    words: list[str] = []
    keys = list(loc)
    while len(keys) > 1 and keys[0] in names and isinstance(keys[1], int):
        words.append(f"{names[str(keys[0])]} {keys[1] + 1}")
        keys = keys[2:]
    if keys:
        words.append(f"`{'.'.join(map(str, keys))}`")
    return ", ".join(words) or "the document"


def _said(message: str) -> str:
    """Return pydantic's message without the names of our classes."""
    return re.sub(r"dictionary or instance of \w+", "object", message)


class _Checks:
    """Collects the questions that can be used, and the others with what is wrong with them."""

    def __init__(self, collected: SquadFile) -> None:
        self._collected = collected
        self._ids: set[str] = set()
        self._num_seen = 0

    def add(
        self,
        where: str,
        question_id: str,
        title: str,
        context: str,
        text: str,
        answers: tuple[tuple[str, int], ...],
        is_impossible: bool | None,
    ) -> None:
        question = SquadQuestion(self._num_seen, question_id, title, context, text.strip(), answers)
        self._num_seen += 1
        problem = next(self._problems(question, is_impossible), None)
        if problem is None:
            self._ids.add(question_id)
            self._collected.questions.append(question)
        else:
            self._collected.skipped.append(
                SkippedRow(self._collected.source, where.removeprefix("record "), where, question.text, problem)
            )

    def _problems(self, question: SquadQuestion, is_impossible: bool | None) -> Iterator[str]:
        if question.id in self._ids:
            yield "another question has this id"
        for name, text in (("question", question.text), ("context", question.context)):
            if not text.strip():
                yield f"its {name} is empty"
            if not _is_unicode(text):
                yield f"its {name} holds half a surrogate pair"
        if is_impossible is not None and is_impossible == bool(question.answers):
            yield f"`is_impossible` is {str(is_impossible).lower()}, but it has {len(question.answers)} answers"
        for text, start in question.answers:
            if not text.strip():
                yield "an answer is empty"
            found = question.context[start : start + len(text)] if start >= 0 else ""
            if found != text:
                said, there = _shortened(text), _shortened(found)
                yield f"the answer `{said}` is not at `answer_start` {start}; there is `{there}`"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shortened(text: str) -> str:
    one_line = ascii(text)[1:-1] if not _is_unicode(text) else " ".join(text.split())
    return one_line if len(one_line) <= 40 else one_line[:39] + "\N{HORIZONTAL ELLIPSIS}"


def _not_empty(collected: SquadFile) -> SquadFile:
    if not collected.questions and not collected.skipped:
        raise DataError(f"{collected.source}: no question in it", _LAYOUT_HINT)
    return collected
