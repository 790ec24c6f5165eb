"""Shards: what is written is read back, nothing half-written is taken, and any damage is found by name."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from exlm_cli.data.corpus import shards
from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset
from exlm_cli.errors import DataError
from exlm_cli.train.records.unigrams import token_log_probs

SEQUENCES = [[5, 6, 7], [8], [9, 10, 65535, 11], [300] * 50]


def _write(directory: Path, vocab_size: int = 1 << 16) -> TokenDataset:
    with ShardWriter(directory, vocab_size, "abc") as writer:
        writer.add(SEQUENCES[:2])
        writer.add([])
        writer.add(SEQUENCES[2:])
    return TokenDataset(directory, vocab_size)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
def test_sequences_come_back_as_they_were_written(tmp_path, vocab_size, dtype):
    dataset = _write(tmp_path / "train", vocab_size)
    assert dataset.tokens.dtype == dtype
    assert (len(dataset), dataset.num_tokens, dataset.fingerprint) == (4, 58, "abc")
    np.testing.assert_array_equal(dataset.lengths, [3, 1, 4, 50])
    assert dataset.lengths.dtype == np.int64
    for index, expected in enumerate(SEQUENCES):
        assert dataset[index].dtype == np.int64
        assert dataset[index].tolist() == expected


def test_a_set_without_sequences_is_read_back(tmp_path):
    with ShardWriter(tmp_path, 100, "abc"):
        pass
    dataset = TokenDataset(tmp_path, 100)
    assert (len(dataset), dataset.num_tokens, dataset.lengths.tolist()) == (0, 0, [])


def test_shards_left_by_an_error_cannot_be_opened(tmp_path):
    with pytest.raises(TypeError), ShardWriter(tmp_path / "train", 100, "x") as writer:
        writer.add([[1], None])
    with pytest.raises(DataError, match=r"meta\.json is missing$"):
        TokenDataset(tmp_path / "train", 1 << 16)


def _alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("tokens.bin", _alter), ("offsets.bin", _alter), ("tokens.bin", lambda path: os.truncate(path, 100)),
     ("offsets.bin", Path.unlink), ("meta.json", lambda path: path.write_text('{"format": 1}'))],
)  # fmt: skip
def test_a_damaged_file_is_found(tmp_path, name, damage):
    _write(tmp_path / "train")
    path = tmp_path / "train" / name
    damage(path)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: ") as caught:
        TokenDataset(tmp_path / "train", 1 << 16)
    assert "`exlm tokenize`" in caught.value.hint


@pytest.mark.parametrize(("vocab_size", "dtype", "bad"), [(100, "<u2", 100), (1 << 17, "<i4", -1)])
def test_an_id_outside_the_vocabulary_is_found_where_the_digest_does_not_look(
    tmp_path, monkeypatch, vocab_size, dtype, bad
):
    """Kernels would read and write beyond the vocabulary; whatever reads the id finds it, and nothing else does."""
    monkeypatch.setattr(shards, "_SAMPLED_BLOCKS", 1)
    monkeypatch.setattr(shards, "_SAMPLED_BLOCK_BYTES", 8)
    with ShardWriter(tmp_path, vocab_size, "x") as writer:
        writer.add([[5, 98, 7]] * 40)
    ids = np.fromfile(tmp_path / "tokens.bin", dtype)
    ids[61] = bad
    ids.tofile(tmp_path / "tokens.bin")
    dataset = TokenDataset(tmp_path, vocab_size)
    others = np.delete(np.arange(40), 20)
    np.testing.assert_array_equal(dataset.read(others, 0)[0], [[5, 98, 7]] * 39)
    for read in (
        lambda: dataset.read(np.arange(40), 0),
        lambda: dataset[20],
        lambda: token_log_probs(dataset, vocab_size),
    ):
        with pytest.raises(DataError, match=r"tokens\.bin: it has the token id \d+, of a vocabulary of") as caught:
            read()
        assert "`exlm tokenize`" in caught.value.hint


def test_shards_of_a_larger_vocabulary_are_refused(tmp_path):
    _write(tmp_path)
    with pytest.raises(DataError, match=r"it has the token id 65535, of a vocabulary of 65535$"):
        TokenDataset(tmp_path, 65535)
