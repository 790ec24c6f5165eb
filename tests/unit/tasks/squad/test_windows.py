"""Windows and spans: what a window holds is put together by hand, the best spans are held against trying all pairs."""

import numpy as np
import pytest

from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.errors import ConfigError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.squad.windows import (
    EncodedContext,
    Window,
    best_span,
    build_windows,
    room_for_paragraph,
)

PARAGRAPH = "The lighthouse at Körsvik burns oil.  It was lit in 1891 by Ada Lund, its first keeper \N{GRINNING FACE}."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([PARAGRAPH] * 10, 330, 2, SilentProgress())


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> EncodedContext:
    return EncodedContext.encode(PARAGRAPH, tokenizer)


def test_blanks_around_a_token_are_not_its_own(context):
    pieces = [PARAGRAPH[start:end] for start, end in context.offsets]
    assert all(piece == piece.strip() for piece in pieces)
    assert "" in pieces  # of the two blanks after the first sentence one is a token alone
    start = PARAGRAPH.index("  ")
    assert context.token_span(start, start + 2) is None


@pytest.mark.parametrize("answer", ["Körsvik", "1891", "Ada Lund", PARAGRAPH, "\N{GRINNING FACE}"])
def test_an_answer_survives_the_way_to_tokens_and_back(context, answer):
    start = PARAGRAPH.index(answer)
    span = context.token_span(start, start + len(answer))
    assert span is not None
    text = PARAGRAPH[context.offsets[span[0]][0] : context.offsets[span[1]][1]]
    assert answer in text
    inner = range(span[0], span[1] + 1)
    others = [context.offsets[i] for i in range(len(context.encoding.ids)) if i not in inner]
    assert all(end <= start or begin >= start + len(answer) for begin, end in others)


@pytest.mark.parametrize(
    ("length", "stride", "num_question"), [(8, 1, 2), (12, 3, 5), (20, 12, 4), (20, 13, 4), (400, 128, 3)]
)
def test_windows_cover_every_token_of_the_paragraph(tokenizer, context, length, stride, num_question):
    question_ids = list(range(300, 300 + num_question))
    windows = build_windows(7, question_ids, context, tokenizer, sequence_length=length, doc_stride=stride)
    whole, room = context.encoding.ids, length - num_question - 3
    starts = range(0, max(len(whole) - room, 0) + stride, stride)  # ceiling of (tokens - room) / stride, and one
    for window, start in zip(windows, starts, strict=True):
        piece = whole[start : start + room]
        expected = [tokenizer.cls_id, *question_ids, tokenizer.sep_id, *piece, tokenizer.sep_id]
        assert (window.question, window.first_token, window.num_tokens) == (7, start, len(piece))
        assert window.token_ids.tolist() == expected
        allowed = np.flatnonzero(window.answerable()).tolist()
        assert allowed == [0, *range(num_question + 2, num_question + 2 + len(piece))]
    assert stride <= room
    assert windows[-1].first_token + windows[-1].num_tokens == len(whole)


def test_a_stride_that_would_jump_over_tokens_is_refused(tokenizer, context):
    with pytest.raises(ConfigError, match=r"`task\.doc_stride` 10 is more than the 9 tokens"):
        build_windows(0, [300, 301], context, tokenizer, sequence_length=14, doc_stride=10)
    assert room_for_paragraph(2, sequence_length=14, doc_stride=9) == 9


def test_an_answer_is_the_target_of_the_windows_that_hold_it_whole():
    window = Window(0, np.zeros(13, dtype=np.int64), context_start=4, first_token=10, num_tokens=8)
    assert [window.target(span) for span in ((10, 10), (12, 17))] == [(4, 4), (6, 11)]
    assert {window.target(span) for span in ((9, 12), (15, 18), (30, 31), None)} == {(0, 0)}


@pytest.mark.parametrize(("num_tokens", "longest"), [(1, 1), (5, 2), (7, 30), (9, 4), (0, 3)])
def test_the_best_span_is_the_best_of_all_pairs(num_tokens, longest):
    window = Window(0, np.zeros(num_tokens + 5, dtype=np.int64), context_start=4, first_token=20, num_tokens=num_tokens)
    logits = np.random.default_rng(num_tokens).normal(size=(num_tokens + 5, 2))
    logits[:4] += 100  # the question, and beyond the paragraph
    logits[4 + num_tokens :] += 100
    pairs = [
        (20 + i, 20 + j, logits[4 + i, 0] + logits[4 + j, 1])
        for i in range(num_tokens)
        for j in range(i, min(i + longest, num_tokens))
    ]
    expected = max(pairs, key=lambda pair: pair[2], default=None)
    assert best_span(window, logits, max_answer_tokens=longest) == expected
