"""Pairs of texts; longest-first cutting is held against taking away token by token."""

import pytest

from exlm_cli.data.bpe import train_bpe
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.pairs import encode_pairs, longest_first

TEXTS = ("The ferry leaves at dawn.", "A boat departs early.")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 300, 2, SilentProgress())


def one_by_one(first: int, second: int, budget: int) -> list[int]:
    while first + second > budget:
        if first > second:
            first -= 1
        else:
            second -= 1
    return [first, second]


def test_the_longer_text_loses_tokens_first() -> None:
    for first in range(9):
        for second in range(9):
            for budget in range(2, 18):
                assert longest_first([first, second], budget) == one_by_one(first, second, budget)


def test_one_text_is_cut_at_its_end() -> None:
    assert [longest_first([length], 4) for length in (0, 3, 4, 9)] == [[0], [3], [4], [4]]


def test_a_pair_stands_between_cls_and_two_separators(tokenizer: Tokenizer) -> None:
    (ids,), num_cut = encode_pairs([TEXTS], tokenizer, 100)
    first, second = (tokenizer.encode(text) for text in TEXTS)
    assert ids.tolist() == [1, *first, 2, *second, 2]
    assert num_cut == 0


def test_one_text_stands_between_cls_and_sep(tokenizer: Tokenizer) -> None:
    sequences, num_cut = encode_pairs([(text,) for text in TEXTS], tokenizer, 100)
    assert [ids.tolist() for ids in sequences] == [[1, *tokenizer.encode(text), 2] for text in TEXTS]
    assert num_cut == 0


def test_what_is_cut_is_counted_and_fills_the_length(tokenizer: Tokenizer) -> None:
    first, second = (tokenizer.encode(text) for text in TEXTS)
    assert len(first) > 4
    assert len(second) > 4
    sequences, num_cut = encode_pairs([TEXTS, ("The", "A")], tokenizer, 9)
    assert sequences[0].tolist() == [1, *first[:3], 2, *second[:3], 2]
    assert num_cut == 1


def test_no_rows_are_no_sequences(tokenizer: Tokenizer) -> None:
    assert encode_pairs([], tokenizer, 9) == ((), 0)
