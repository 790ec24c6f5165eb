"""Shards: what is written is read back, nothing half-written is ever seen, and any damage is found by name."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from exlm_cli.data.corpus import shards
from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset, sampled_sha256
from exlm_cli.errors import DataError

SEQUENCES = [[5, 6, 7], [8], [9, 10, 65535, 11], [300] * 50]


def _write(directory: Path, vocab_size: int = 1 << 16) -> TokenDataset:
    with ShardWriter(directory, vocab_size, "abc") as writer:
        writer.add(SEQUENCES[:2])
        writer.add([])
        writer.add(SEQUENCES[2:])
    return TokenDataset(directory)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
def test_sequences_come_back_as_they_were_written(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    dataset = _write(tmp_path / "train", vocab_size)
    assert dataset.tokens.dtype == dtype
    assert len(dataset) == 4
    assert dataset.num_tokens == 58
    assert dataset.fingerprint == "abc"
    np.testing.assert_array_equal(dataset.lengths, [3, 1, 4, 50])
    assert dataset.lengths.dtype == np.int64
    for index, expected in enumerate(SEQUENCES):
        assert dataset[index].dtype == np.int64
        assert dataset[index].tolist() == expected


def test_indices_outside_are_refused(tmp_path: Path) -> None:
    dataset = _write(tmp_path / "train")
    for index in (-1, 4):
        with pytest.raises(IndexError, match=rf"^sequence {index} of 4$"):
            dataset[index]


def test_only_the_finished_directory_is_there(tmp_path: Path) -> None:
    _write(tmp_path / "train")
    assert [p.name for p in tmp_path.iterdir()] == ["train"]
    assert sorted(p.name for p in (tmp_path / "train").iterdir()) == ["meta.json", "offsets.bin", "tokens.bin"]


def test_an_error_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    _write(tmp_path / "train")

    def fail() -> None:
        with ShardWriter(tmp_path / "train", 100, "new") as writer:
            writer.add([[1]])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["train"]
    assert TokenDataset(tmp_path / "train").fingerprint == "abc"


def test_writing_again_replaces(tmp_path: Path) -> None:
    _write(tmp_path / "train")
    with ShardWriter(tmp_path / "train", 100, "new") as writer:
        writer.add([[1, 2]])
    dataset = TokenDataset(tmp_path / "train")
    assert (dataset.fingerprint, len(dataset)) == ("new", 1)


def test_without_a_sequence_there_is_no_directory(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "train", 100, "x") as writer:
        writer.add([])
    assert list(tmp_path.iterdir()) == []


def test_sequences_are_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAX_PENDING_SEQUENCES", 2)
    dataset = _write(tmp_path / "train")
    assert [dataset[index].tolist() for index in range(4)] == SEQUENCES


def test_an_empty_sequence_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"^a sequence without tokens cannot be stored$"),
        ShardWriter(tmp_path / "train", 100, "x") as writer,
    ):
        writer.add([[1], []])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
@pytest.mark.parametrize(("fault", "words"), [("cut", "truncated"), ("alter", "altered"), ("remove", "missing")])
def test_a_damaged_file_is_found(tmp_path: Path, name: str, fault: str, words: str) -> None:
    _write(tmp_path / "train")
    path = tmp_path / "train" / name
    content = bytearray(path.read_bytes())
    match fault:
        case "cut":
            path.write_bytes(content[:-1])
        case "alter":
            content[9] ^= 1
            path.write_bytes(content)
        case "remove":
            path.unlink()
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*{words}") as caught:
        TokenDataset(tmp_path / "train")
    assert "`exlm tokenize`" in caught.value.hint


@pytest.mark.parametrize("content", [None, "[]", "{", '{"format": 2}'])
def test_a_missing_or_foreign_meta_file_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "meta.json").write_text(content)
    with pytest.raises(DataError, match=r"meta\.json") as caught:
        TokenDataset(tmp_path)
    assert "`exlm tokenize`" in caught.value.hint


def test_shards_of_another_format_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "train")
    path = tmp_path / "train" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(DataError, match=r"meta\.json: `format` is 2"):
        TokenDataset(tmp_path / "train")


def test_the_digest_of_a_file_below_16_mib_covers_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = bytearray(200_001)
    path.write_bytes(content)
    whole = sampled_sha256(path)
    for position in (0, 65_535, 65_536, 131_072, 196_607, 196_608, 200_000):
        changed = content.copy()
        changed[position] = 1
        path.write_bytes(changed)
        assert sampled_sha256(path) != whole


def test_the_digest_of_an_empty_file_is_that_of_its_size(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").write_bytes(b"\0")
    assert sampled_sha256(tmp_path / "a") != sampled_sha256(tmp_path / "b")
