"""Windows of tokens over a question and its paragraph, and answers as spans of tokens.

A window is [CLS] question [SEP] piece of the paragraph [SEP]. Axes: L tokens of a window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from numpy.typing import NDArray

from exlm_cli.data import IntArray
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.tasks.base import FloatArray

CLS_INDEX = 0
"""Position of [CLS] in a window; the span (0, 0) means "no answer here"."""

Offsets = list[tuple[int, int]]


@dataclass(frozen=True)
class EncodedContext:
    """A paragraph in tokens.

    Attributes:
        offsets: Characters [start, end) of each token without the blanks at its ends; empty for a token of only blanks.
    """

    text: str
    encoding: tokenizers.Encoding
    offsets: Offsets

    @classmethod
    def encode(cls, text: str, tokenizer: Tokenizer) -> "EncodedContext":
        """Tokenise a paragraph."""
        encoding = tokenizer.encode_with_offsets(text)
        return cls(text, encoding, [_without_blanks(text, start, end) for start, end in encoding.offsets])

    def pieces(self, size: int, stride: int) -> list[list[int]]:
        """Return its tokens in pieces of at most `size`, one every `stride` tokens until a piece has the last one."""
        whole = tokenizers.Encoding.merge([self.encoding], growing_offsets=False)  # a copy: `truncate` is in place
        whole.truncate(size, stride=size - stride)
        return [piece.ids for piece in (whole, *whole.overflowing)]

    def token_span(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first and last token that share a character with [start, end); None if there is none."""
        shares = [index for index, (first, last) in enumerate(self.offsets) if max(first, start) < min(last, end)]
        return (shares[0], shares[-1]) if shares else None


def _without_blanks(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end]
    start += len(piece) - len(piece.lstrip())
    return start, start + len(piece.strip())


@dataclass(frozen=True)
class Window:
    """One piece of a paragraph behind its question.

    Attributes:
        token_ids: (L,) the whole window.
        context_start: Position in the window of its first paragraph token.
        first_token: Index of that token in the paragraph.
        num_tokens: Number of paragraph tokens in the window.
    """

    question: int
    token_ids: IntArray
    context_start: int
    first_token: int
    num_tokens: int

    def answerable(self) -> NDArray[np.bool_]:
        """Return (L,): True at the paragraph's tokens and at [CLS]."""
        allowed = np.zeros(len(self.token_ids), dtype=np.bool_)
        allowed[CLS_INDEX] = True
        allowed[self.context_start : self.context_start + self.num_tokens] = True
        return allowed

    def target(self, span: tuple[int, int] | None) -> tuple[int, int]:
        """Return first and last answer token of this window, (0, 0) if the answer is not wholly within it.

        Args:
            span: First and last token of the answer, counted in the paragraph; None: no answer.
        """
        if span is None or span[0] < self.first_token or span[1] >= self.first_token + self.num_tokens:
            return CLS_INDEX, CLS_INDEX
        shift = self.context_start - self.first_token
        return span[0] + shift, span[1] + shift


def room_for_paragraph(num_question: int, *, sequence_length: int, doc_stride: int, num_special: int = 3) -> int:
    """Return how many tokens a window leaves to a paragraph beside a question of `num_question` tokens.

    Args:
        doc_stride: Paragraph tokens from the start of a window to the start of the next.
        num_special: [CLS], [SEP], and the tokens of the tokenizer between two texts.

    Raises:
        ConfigError: `doc_stride` is more than that, so tokens would be left out.
    """
    room = sequence_length - num_question - num_special
    if doc_stride > room:
        raise ConfigError(
            f"`task.doc_stride` {doc_stride} is more than the {room} tokens that `task.sequence_length` "
            f"{sequence_length} leaves to a paragraph beside a question of {num_question} tokens",
            "give a larger `task.sequence_length`, or smaller `task.doc_stride` and `task.max_query_tokens`, such as "
            "those of the recipe `squad-small`",
        )
    return room


def build_windows(
    question: int,
    question_ids: Sequence[int],
    context: EncodedContext,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    doc_stride: int,
) -> list[Window]:
    """Cut a paragraph into windows so that each of its tokens is in at least one.

    Args:
        question_ids: Tokens of the question, cut to their maximum.
        doc_stride: As for `room_for_paragraph`.

    Raises:
        ConfigError: As `room_for_paragraph`.
    """
    head = [tokenizer.cls_id, *question_ids, *tokenizer.pair_ids]
    lengths = {"sequence_length": sequence_length, "doc_stride": doc_stride}
    room = room_for_paragraph(len(question_ids), **lengths, num_special=2 + len(tokenizer.pair_ids))
    return [
        Window(question, np.array([*head, *piece, tokenizer.sep_id]), len(head), number * doc_stride, len(piece))
        for number, piece in enumerate(context.pieces(room, doc_stride))
    ]


def best_span(window: Window, logits: FloatArray, *, max_answer_tokens: int) -> tuple[int, int, float] | None:
    """Return a window's best span: first and last token, counted in the paragraph, and score; None if it has no tokens.

    Exact: every span of at most `max_answer_tokens` tokens is scored.

    Args:
        logits: (L, 2) of first and last token; the score is the sum of two.
    """
    inside = slice(window.context_start, window.context_start + window.num_tokens)
    first_logits, last_logits = logits[inside, 0], logits[inside, 1]
    num_tokens = len(first_logits)
    if not num_tokens:
        return None
    # row d holds the spans of d + 1 tokens, by their first token
    scores = np.full((min(max_answer_tokens, num_tokens), num_tokens), -np.inf)
    for extra in range(len(scores)):
        scores[extra, : num_tokens - extra] = first_logits[: num_tokens - extra] + last_logits[extra:]
    extra, first = divmod(int(scores.argmax()), num_tokens)
    begin = window.first_token + first
    return begin, begin + extra, float(scores[extra, first])


def best_answer(
    context: EncodedContext, windows: Iterable[tuple[Window, FloatArray]], *, max_answer_tokens: int
) -> tuple[str, float, float]:
    """Return the best answer over all windows of a question, its score, and the null score.

    No answer begins or ends at a token that is only blanks; without any span the answer is empty and its score -inf.
    The null score is the smallest sum of the two logits at [CLS] over the windows, as in BERT: a paragraph has no
    answer only if no window of it has one.

    Args:
        windows: Each window of the question with its (L, 2) logits.
    """
    text, best, null_score = "", -np.inf, np.inf
    is_blank = np.array([start == end for start, end in context.offsets], dtype=np.bool_)
    for window, logits in windows:
        null_score = min(null_score, float(logits[CLS_INDEX].sum()))
        logits = logits.copy()
        piece = logits[window.context_start : window.context_start + window.num_tokens]
        piece[is_blank[window.first_token : window.first_token + window.num_tokens]] = -np.inf
        span = best_span(window, logits, max_answer_tokens=max_answer_tokens)
        if span is not None and span[2] > best:
            first, last, best = span
            text = context.text[context.offsets[first][0] : context.offsets[last][1]]
    return text, best, null_score
