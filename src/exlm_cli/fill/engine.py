"""Joint fillings of the masks of many texts: the most probable ones, or some that are drawn."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exlm_cli.dag.read import MaskedText, read_masked
from exlm_cli.data.tokenizer import MASK
from exlm_cli.errors import DataError
from exlm_cli.fill.molecules import ONE_SPELLING, read_molecule, spell
from exlm_cli.fill.passes import Ask, Found, fill_inputs, score_tokens
from exlm_cli.fill.targets import Targets
from exlm_cli.fill.words import MaskWords
from exlm_cli.format import format_number_of
from exlm_cli.progress import Progress
from exlm_cli.train.pretrained import Pretrained

MAX_LENGTHS = 64
"""Limit on the inputs that `max_tokens` makes of one row."""
_CHUNK_CELLS, _CHUNK_ROWS = 2**24, 64
"""Rows that are filled at once: as many as have distributions of 128 MiB."""
_ROUNDS = 6
"""Rows that lack fillings, since invalid molecules and repeated draws are left out, are asked for twice as many."""


@dataclass(frozen=True)
class FillSettings:
    """What is asked of every row.

    Attributes:
        top: Most probable fillings to find.
        passes: P; 1 fills all masks jointly, more fill the surest first and read the text again.
        samples: Fillings to draw in place of the most probable ones; 0: none.
        temperature, seed: Of the draws.
        has_repeats: Whether a filling may be drawn twice.
        max_tokens: Tokens that may stand at each mask, at most.
        is_length_normalised: Whether fillings of different lengths are compared by log-probability per token.
        spellings: In how many spellings of an unfinished molecule its masks are asked, for the mean of the answers.
        keeps_invalid: Whether fillings of SMILES that are no molecules are listed.
    """

    top: int = 10
    passes: int = 1
    samples: int = 0
    temperature: float = 1.0
    seed: int = 0
    has_repeats: bool = False
    max_tokens: int = 1
    is_length_normalised: bool = False
    spellings: int = 1
    keeps_invalid: bool = False


@dataclass(frozen=True)
class Line:
    """One filling.

    Attributes:
        filling: The words that fill the masks, as `MaskWords` writes them.
        filled: The text with its masks filled; of a molecule the canonical SMILES.
        log_prob: Its log-probability, nats, among all fillings with as many tokens; in several passes, that of the
            tokens of each pass together, given those of the passes before.
        log_prob_alone: The sum of those of its tokens, each mask on its own.
        num_tokens: Tokens that fill the masks.
        is_proven: Whether no filling that is missing is more probable than the last one that is listed.
        problem: Why it is no molecule; empty where it is one, and of text.
    """

    filling: str
    filled: str
    log_prob: float
    log_prob_alone: float
    num_tokens: int
    is_proven: bool
    problem: str = ""


@dataclass(frozen=True)
class FilledRow:
    """Fillings of one text, best first, or in the order of the draws.

    Attributes:
        problem: Why it has none; empty where it has.
        notes: What a report says about its reading.
    """

    lines: tuple[Line, ...] = ()
    problem: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Reading:
    """One way to read a row.

    Attributes:
        text: The row as it is written.
        lengths: Masks in each place.
        ask: What the model is asked.
        order: For each of its masks, that of the row; another order in another spelling.
        num_spellings: How many readings have these lengths, in other spellings.
    """

    row: int
    text: str
    lengths: tuple[int, ...]
    ask: Ask
    order: tuple[int, ...]
    num_spellings: int = 1


def fill_texts(
    pretrained: Pretrained,
    texts: Sequence[str],
    settings: FillSettings,
    progress: Progress,
    targets: Sequence[Sequence[str]] | None = None,
) -> Iterator[FilledRow]:
    """Yield the fillings of each text, in order; one that cannot be filled has a problem.

    Args:
        targets: Words that may stand at the masks of each text; None: all. A word of several tokens stands where as
            many masks are next to each other, or with `max_tokens` at one.
    """
    words = MaskWords(pretrained.tokenizer)
    chunk: dict[int, list[_Reading] | str] = {}
    num_cells = 0
    with progress.bar("fillings", len(texts)) as bar:
        for row, text in enumerate(texts):
            try:
                chunk[row] = _readings(
                    pretrained, row, text, settings, words, None if targets is None else targets[row]
                )
            except DataError as error:
                chunk[row] = error.message
            num_cells += _cells(pretrained, chunk[row], settings)
            if row + 1 == len(texts) or len(chunk) == _CHUNK_ROWS or num_cells > _CHUNK_CELLS:
                yield from _fill_chunk(pretrained, chunk, settings, words)
                chunk, num_cells = {}, 0
                bar.update(row + 1)


def _readings(
    pretrained: Pretrained,
    row: int,
    text: str,
    settings: FillSettings,
    words: MaskWords,
    targets: Sequence[str] | None,
) -> list[_Reading]:
    masked = read_masked(pretrained, text)
    num_places = masked.text.count(MASK)
    if settings.max_tokens**num_places > MAX_LENGTHS:
        raise DataError(
            f"{format_number_of(num_places, 'mask')} of 1 to {settings.max_tokens} tokens make "
            f"{settings.max_tokens**num_places:,} inputs; at most {MAX_LENGTHS} are read",
            "give a lower `--max-tokens`, or fewer masks",
        )
    draw = np.random.default_rng([settings.seed, row])
    ask = Ask(masked, settings.top, settings.samples, settings.temperature, draw)
    if settings.spellings > 1:
        spelled = spell(masked.text, settings.spellings)
        asks = [replace(ask, masked=read_masked(pretrained, text)) for text, _ in spelled]
        lengths = (1,) * num_places
        return [
            _Reading(row, masked.text, lengths, ask, order, len(spelled))
            for ask, (_, order) in zip(asks, spelled, strict=True)
        ]
    found, problem = [], ""
    for lengths in itertools.product(range(1, settings.max_tokens + 1), repeat=num_places):
        try:
            read = masked if settings.max_tokens == 1 else read_masked(pretrained, _widened(masked.text, lengths))
            allowed = None
            if targets is not None:
                allowed = _targets_of(pretrained, read, lengths, targets, words, is_single=settings.max_tokens > 1)
            asked = replace(ask, masked=read, allowed=allowed)
            found.append(_Reading(row, masked.text, lengths, asked, tuple(range(sum(lengths)))))
        except DataError as error:
            problem = error.message
    if not found:
        raise DataError(problem, "give other targets, or more masks")
    return found


def _widened(text: str, lengths: Sequence[int]) -> str:
    """Return a text with so many masks in the place of each."""
    several = iter(lengths)
    return re.sub(re.escape(MASK), lambda _: MASK * next(several), text)


def _targets_of(
    pretrained: Pretrained,
    masked: MaskedText,
    lengths: Sequence[int],
    targets: Sequence[str],
    words: MaskWords,
    *,
    is_single: bool,
) -> Targets:
    mask_id = pretrained.tokenizer.mask_id
    places = np.flatnonzero(masked.input_ids == mask_id)
    runs = np.diff(np.flatnonzero(np.diff(places, prepend=-9, append=places[-1] + 9) > 1)).tolist()
    begins_text = pretrained.recipe.data.kind == "text" and masked.input_ids[1] == mask_id
    return Targets(
        words,
        targets,
        words.blanks_before(masked.text),
        lengths if is_single else runs,
        begins_text=begins_text,
        is_single=is_single,
    )


def _cells(pretrained: Pretrained, readings: list[_Reading] | str, settings: FillSettings) -> int:
    """Return the numbers that the distributions of a row need at once."""
    if isinstance(readings, str):
        return 0
    num_nodes = sum(pretrained.model.num_states_per_mask * sum(reading.lengths) + 2 for reading in readings)
    return (
        num_nodes
        * pretrained.tokenizer.vocab_size
        * (1 if settings.passes == 1 else max(settings.top, settings.samples))
    )


def _fill_chunk(
    pretrained: Pretrained, chunk: dict[int, list[_Reading] | str], settings: FillSettings, words: MaskWords
) -> Iterator[FilledRow]:
    """Yield the fillings of some rows; rows that lack some are asked for more, as often as that may help."""
    problems = {row: given for row, given in chunk.items() if isinstance(given, str)}
    left = {row: given for row, given in chunk.items() if not isinstance(given, str)}
    lines: dict[int, list[Line]] = {}
    for more in (2**number for number in range(_ROUNDS)):
        readings = [_asking_for_more(reading, more) for given in left.values() for reading in given]
        answers = iter(fill_inputs(pretrained, [reading.ask for reading in readings], settings.passes))
        for row, given in list(left.items()):
            answered = [(reading, next(answers)) for reading in given]
            told = {reading: found for reading, found in answered if not isinstance(found, str)}
            is_short = not told or (not settings.samples and max(map(len, told.values())) < settings.top * more)
            if not told:
                problems[row] = str(answered[0][1])
            elif settings.spellings > 1:
                told = _found_in_all(pretrained, told)
            new = [_line(words, reading, one) for reading, found in told.items() for one in found]
            known = lines.get(row, []) if settings.samples else []
            lines[row] = _ordered([*known, *new], settings)
            if is_short or settings.has_repeats or len(lines[row]) >= (settings.samples or settings.top):
                del left[row]
        if not left or not (settings.samples or words.is_of_molecules):
            break
    for row, readings_or_problem in chunk.items():
        if row in problems:
            yield FilledRow(problem=problems[row])
        elif not lines[row]:
            yield FilledRow(problem="no filling that was found is a molecule")
        else:
            yield FilledRow(tuple(lines[row]), notes=_notes_on(readings_or_problem, len(lines[row]), settings))


def _asking_for_more(reading: _Reading, more: int) -> _Reading:
    ask = reading.ask
    return replace(reading, ask=replace(ask, top=ask.top * more, draws=ask.draws * more))


def _notes_on(given: list[_Reading] | str, num_lines: int, settings: FillSettings) -> tuple[str, ...]:
    assert not isinstance(given, str), "a row with lines was read"
    notes = given[0].ask.masked.notes
    if num_lines < settings.samples:
        notes = (*notes, f"fewer than {settings.samples} different fillings were drawn")
    if settings.spellings > 1 and len(given) == 1:
        notes = (*notes, ONE_SPELLING)
    return notes


def _found_in_all(pretrained: Pretrained, found: Mapping[_Reading, Sequence[Found]]) -> dict[_Reading, list[Found]]:
    """Return for each spelling all fillings that were found in any, with their probabilities in this one."""
    known = {_tokens_by_mask(reading, one): None for reading, fillings in found.items() for one in fillings}
    tokens_NT = np.array([*known])
    asked = [tokens_NT[:, list(reading.order)] for reading in found]
    scored = score_tokens(pretrained, [reading.ask.masked for reading in found], asked)
    return dict(zip(found, scored, strict=True))


def _tokens_by_mask(reading: _Reading, found: Found) -> tuple[int, ...]:
    """Return the tokens of a filling in the order of the masks of the row."""
    in_reading = [token for _, token in sorted(found.tokens.items())]
    return tuple(token for _, token in sorted(zip(reading.order, in_reading, strict=True)))


def _line(words: MaskWords, reading: _Reading, found: Found) -> Line:
    tokens = iter(_tokens_by_mask(reading, found))
    by_place = [[next(tokens) for _ in range(length)] for length in reading.lengths]
    filled, problem = words.text_of(found.input_ids.tolist()), ""
    if words.is_of_molecules:
        filled, problem = read_molecule(filled)
    log_share = -math.log(reading.num_spellings)
    return Line(
        filling=words.write(reading.text, by_place),
        filled=filled,
        log_prob=found.log_prob + log_share,
        log_prob_alone=found.log_prob_alone + log_share,
        num_tokens=len(found.tokens),
        is_proven=found.is_proven,
        problem=problem,
    )


def score_of(line: Line, settings: FillSettings) -> float:
    """Return what fillings are compared by: the log-probability, nats, or that per token."""
    return line.log_prob / line.num_tokens if settings.is_length_normalised else line.log_prob


def _ordered(lines: Sequence[Line], settings: FillSettings) -> list[Line]:
    """Return fillings best first, those that read the same once; draws stay in their order."""
    if not settings.keeps_invalid:
        lines = [line for line in lines if not line.problem]
    if settings.samples:
        seen: dict[object, Line] = {}
        for number, line in enumerate(lines):
            seen.setdefault(number if settings.has_repeats else line.filled, line)
        return [*seen.values()][: settings.samples]
    is_proven = all(line.is_proven for line in lines)
    merged: dict[tuple[object, ...], Line] = {}
    for line in sorted(lines, key=lambda line: -line.log_prob):
        key = (line.filled, line.num_tokens, line.filling if "\N{REPLACEMENT CHARACTER}" in line.filled else "")
        merged[key] = _together(merged[key], line) if key in merged else line
    ordered = sorted(merged.values(), key=lambda line: -score_of(line, settings))
    if settings.max_tokens > 1:  # of the same text as fewer or more tokens, the better one
        best: dict[str, Line] = {}
        for line in ordered:
            best.setdefault(line.filled, line)
        ordered = [*best.values()]
    return [replace(line, is_proven=is_proven) for line in ordered[: settings.top]]


def _together(best: Line, other: Line) -> Line:
    """Return a filling with the probabilities of both ways to it."""
    return replace(
        best,
        log_prob=float(np.logaddexp(best.log_prob, other.log_prob)),
        log_prob_alone=float(np.logaddexp(best.log_prob_alone, other.log_prob_alone)),
    )
