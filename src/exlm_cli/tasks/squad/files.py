"""Reader of SQuAD 2.0 questions: the official JSON, or flat rows as the Hub has them; every answer is checked."""

import itertools
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from exlm_cli.data.rows.decode import load_json, open_file
from exlm_cli.data.rows.records import Record, SkippedRow
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, is_unicode, printable, shorten

NUM_QUESTIONS = {"train": 130_319, "valid": 11_873}
"""Questions of the official files."""

_FLAT_HINT = "a row holds id, title, context, question, and answers: text and answer_start, one for each answer"
_LAYOUT_HINT = "the layout is that of the official train-v2.0.json: data, paragraphs, context, qas, id, answers"


@dataclass(frozen=True)
class SquadQuestion:
    """One question on one paragraph.

    Attributes:
        row: Number in the file, counted from 0.
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
        has_answers: Whether every question has a list of answers, empty or not.
    """

    source: str
    questions: list[SquadQuestion] = field(default_factory=list)
    skipped: list[SkippedRow] = field(default_factory=list)
    has_answers: bool = True
    ids: set[str] = field(default_factory=set)

    def add(self, question: SquadQuestion, where: str, is_impossible: bool | None) -> None:
        """Keep a question or, if something is wrong with it, skip it."""
        problem = next(_problems(question, is_impossible, self.ids), None)
        if problem is None:
            self.ids.add(question.id)
            self.questions.append(question)
        else:
            row = where.removeprefix("record ")
            self.skipped.append(SkippedRow(self.source, row, where, question.text, problem))

    def checked(self) -> Self:
        """Return this file; refuse one without a question."""
        if not self.questions and not self.skipped:
            raise DataError(f"{self.source}: no question in it", _LAYOUT_HINT)
        return self


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


def read_squad_json(path: Path, *, needs_answers: bool = True) -> SquadFile:
    """Read an official `train-v2.0.json` or `dev-v2.0.json`, also .gz.

    Args:
        needs_answers: If false, a question may lack `answers`, as in a test set.

    Raises:
        DataError: The file cannot be read, is not JSON, or does not have the official layout.
    """
    with open_file(path) as file:
        content = load_json(path, file, _LAYOUT_HINT)
    try:
        document = _Document.model_validate(content)
    except ValidationError as error:
        raise DataError(f"{path}: {_describe(error)}", _LAYOUT_HINT) from error
    found = SquadFile(str(path))
    row = itertools.count()
    for article in document.data:
        for number, paragraph in enumerate(article.paragraphs, start=1):
            for given in paragraph.qas:
                if given.answers is None and needs_answers:
                    raise DataError(f"{path}: question `{given.id}` has no list of `answers`", _LAYOUT_HINT)
                found.has_answers &= given.answers is not None
                answers = tuple((answer.text, answer.answer_start) for answer in given.answers or ())
                text = given.question.strip()
                question = SquadQuestion(next(row), given.id, article.title, paragraph.context, text, answers)
                where = f"article `{article.title}`, paragraph {number}, question `{given.id}`"
                found.add(question, where, None if given.answers is None else given.is_impossible)
    return found.checked()


def read_squad_rows(source: str, records: Iterable[Record]) -> SquadFile:
    """Read flat rows with `id`, `title`, `context`, `question` and `answers`, as the Hub has them.

    Raises:
        DataError: A row does not have that layout.
    """
    found = SquadFile(source)
    for index, record in enumerate(records):
        try:
            row = _FlatRow.model_validate(record.values)
        except ValidationError as error:
            raise DataError(f"{record.where}: {_describe(error)}", _FLAT_HINT) from error
        texts, starts = row.answers.text, row.answers.answer_start
        if len(texts) != len(starts):
            raise DataError(
                f"{record.where}: {len(texts)} answer texts, but {len(starts)} values of `answer_start`", _FLAT_HINT
            )
        answers = tuple(zip(texts, starts, strict=True))
        question = SquadQuestion(index, row.id, row.title, row.context, row.question.strip(), answers)
        found.add(question, f"record {record.number}, question `{row.id}`", None)
    return found.checked()


def questions_of_pairs(pairs: Iterable[tuple[str, str]]) -> tuple[list[SquadQuestion], tuple[str, ...]]:
    """Return the questions that can be used among pairs of question and paragraph, and for each pair its problem."""
    questions, problems = [], []
    for row, (text, context) in enumerate(pairs):
        question = SquadQuestion(row, str(row), "", context, text.strip(), ())
        problems.append(next(_problems(question, None, ()), ""))
        if not problems[-1]:
            questions.append(question)
    return questions, tuple(problems)


def _describe(error: ValidationError) -> str:
    """Return the first finding with its place in the file, without the names of our classes."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    message = re.sub(r"dictionary or instance of \w+", "object", first["msg"])
    return f"`{place}`: {message}" if place else message


def _problems(question: SquadQuestion, is_impossible: bool | None, ids: Container[str]) -> Iterator[str]:
    if question.id in ids:
        yield "another question has this id"
    for name, text in (("question", question.text), ("context", question.context)):
        if not text.strip():
            yield f"its {name} is empty"
        if not is_unicode(text):
            yield f"its {name} contains a lone surrogate"
    if is_impossible is not None and is_impossible == bool(question.answers):
        answers = format_number_of(len(question.answers), "answer")
        yield f"`is_impossible` is {str(is_impossible).lower()}, but it has {answers}"
    for text, start in question.answers:
        if not text.strip():
            yield "an answer is empty"
        found = question.context[start : start + len(text)] if start >= 0 else ""
        if found != text:
            yield f"the answer `{_quoted(text)}` is not at `answer_start` {start}; there is `{_quoted(found)}`"


def _quoted(text: str) -> str:
    return shorten(printable(" ".join(text.split())), 40)
