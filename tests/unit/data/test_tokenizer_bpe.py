"""Byte-level BPE: it is lossless by construction, repeatable, and says when the vocabulary cannot hold the bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.data.tokenizer import MIN_BPE_VOCABULARY, train_bpe
from exlm_cli.errors import TokenizerError
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder

SENTENCES = list(sample_sentences(2000, seed=3))
TOKENIZER = train_bpe(SENTENCES, 500, 2, SilentProgress())


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_from_its_tokens(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.special_ids.isdisjoint(ids)


def test_lines_joined_by_a_newline_have_the_tokens_of_each_line_and_of_the_newline():
    first, second = SENTENCES[:2]
    joined = [*TOKENIZER.encode(first), *TOKENIZER.encode("\n"), *TOKENIZER.encode(second)]
    assert TOKENIZER.encode(f"{first}\n{second}") == joined


def test_training_twice_gives_the_same_tokenizer():
    assert train_bpe(iter(SENTENCES), 500, 2, SilentProgress()).fingerprint == TOKENIZER.fingerprint


def test_rare_pairs_are_not_merged():
    progress = Recorder()
    tokenizer = train_bpe(["abcdefgh"], 1000, 2, progress)
    assert tokenizer.vocab_size == MIN_BPE_VOCABULARY == 261
    assert progress.said == ["trained a byte-level BPE of 261 tokens"]


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(TokenizerError, match=r"`tokenizer\.vocab_size` 260 .* at least 261$") as caught:
        train_bpe(SENTENCES, 260, 2, SilentProgress())
    assert "`tokenizer.vocab_size=261`" in caught.value.hint
