"""Token shards: sequences of token ids on disk, memory-mapped, written once.

A shard directory holds `tokens.bin` (uint16, or int32 if the vocabulary needs it), `offsets.bin` (int64, one more
than sequences) and `meta.json`. Little-endian, no pickle. Opening takes milliseconds whatever their size; every id is
looked at when it is read.
"""

import hashlib
import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, final

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data import IntArray
from exlm_cli.errors import CheckpointError, DataError
from exlm_cli.files import JsonModel, read_json, write_json

TRAIN, VALID, SPELLINGS = "train", "valid", "valid-spellings"
"""Shard directories of a corpus."""
_META, _TOKENS, _OFFSETS = "meta.json", "tokens.bin", "offsets.bin"
_SAMPLED_BLOCK_BYTES, _SAMPLED_BLOCKS = 1 << 16, 256
_BUFFERED_TOKENS = 1 << 16
_REBUILD_HINT = "delete the directory and run `exlm tokenize`"


class _Meta(JsonModel):
    """Content of `meta.json`; `max_id` is -1 without tokens, `sha256` is by file, see `sampled_sha256`."""

    format: Literal[2] = 2
    fingerprint: str
    dtype: Literal["<u2", "<i4"]
    num_sequences: int
    num_tokens: int
    max_id: int
    sha256: dict[str, str]


@final
class TokenDataset:
    """Token sequences without [CLS] and [SEP] at their ends, read from disk on demand.

    Attributes:
        tokens: (num_tokens,) all sequences end to end, memory-mapped.
        offsets: (N + 1,) where each sequence begins, memory-mapped.
        fingerprint: Hash of everything that went into the shards.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """Open a shard directory.

        Raises:
            DataError: It is missing, truncated or altered, or was written with an id that is not in the vocabulary.
        """
        self.directory = directory
        self._vocab_size = vocab_size
        meta = _read_meta(directory)
        self.fingerprint = meta.fingerprint
        self.num_tokens = meta.num_tokens
        dtype = np.dtype(meta.dtype)
        sizes_bytes = {_TOKENS: self.num_tokens * dtype.itemsize, _OFFSETS: (meta.num_sequences + 1) * 8}
        for name, size_bytes in sizes_bytes.items():
            path, sha256 = directory / name, meta.sha256.get(name)
            if not path.is_file() or path.stat().st_size != size_bytes or sampled_sha256(path) != sha256:
                what = "missing, truncated or altered since the token shards were written"
                raise DataError(f"{path}: {what}", _REBUILD_HINT)
        self._refuse_beyond_vocabulary(meta.max_id)
        # an empty file cannot be mapped
        self.tokens: NDArray[Any] = (
            np.memmap(directory / _TOKENS, dtype=dtype, mode="r") if self.num_tokens else np.zeros(0, dtype)
        )
        self.offsets: IntArray = np.memmap(directory / _OFFSETS, dtype="<i8", mode="r")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> IntArray:
        """(N,) tokens of each sequence."""
        ends: IntArray = np.asarray(self.offsets)
        return ends[1:] - ends[:-1]

    def __getitem__(self, index: int) -> IntArray:
        """Return the (n,) token ids of one sequence; errors are also those of `read`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.read_stream(int(self.offsets[index]), int(self.offsets[index + 1]))

    def read_stream(self, start: int, stop: int) -> IntArray:
        """Return the token ids from `start` to `stop` of all sequences end to end; errors are those of `read`."""
        return self._checked(np.asarray(self.tokens)[start:stop].astype(np.int64))

    def read(self, indices: IntArray, pad_id: int) -> tuple[IntArray, IntArray]:
        """Return the (B, n) token ids of several sequences, `pad_id` beyond their (B,) lengths, which come second.

        Raises:
            DataError: An id is not in the vocabulary: the file was altered where its digest does not look.
        """
        starts, lengths = np.asarray(self.offsets)[indices], self.lengths[indices]
        padded = np.full((len(indices), int(lengths.max())), pad_id, dtype=np.int64)
        # slices of a plain array: those of a memory map take ten times as long to make
        tokens = np.asarray(self.tokens)
        for row, start, length in zip(padded, starts.tolist(), lengths.tolist(), strict=True):
            row[:length] = tokens[start : start + length]
        return self._checked(padded), lengths

    def _checked(self, ids: IntArray) -> IntArray:
        """Return ids after a look at each: kernels write where an id points to."""
        # as unsigned numbers, negative ids are the highest of all
        self._refuse_beyond_vocabulary(int(ids.view(np.uint64).max(initial=0)))
        return ids

    def _refuse_beyond_vocabulary(self, max_id: int) -> None:
        if max_id >= self._vocab_size:
            raise DataError(
                f"{self.directory / _TOKENS}: it has the token id {max_id}, of a vocabulary of {self._vocab_size}",
                _REBUILD_HINT,
            )


@dataclass
class Written:
    """How much is in a shard directory; `max_id` is the highest token id, -1 without any."""

    num_sequences: int = 0
    num_tokens: int = 0
    max_id: int = -1


@final
class ShardWriter:
    """Streams sequences into a shard directory; `meta.json`, written on leaving without an error, makes it complete.

    Ids are below `vocab_size`, which decides between uint16 and int32, and no sequence is empty.

    Attributes:
        written: How much was added.
    """

    def __init__(self, directory: Path, vocab_size: int, fingerprint: str, written: Written | None = None) -> None:
        """Write anew, or go on after what was `written`: the files hold just that."""
        self.directory = directory
        self.fingerprint = fingerprint
        self.written = written or Written()
        self._mode = "wb" if written is None else "ab"
        self._dtype: Literal["<u2", "<i4"] = "<u2" if vocab_size <= 1 << 16 else "<i4"
        # ids and ends that are not written yet
        self._ids, self._ends = array("i"), array("q", [0] if written is None else [])

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            self._tokens, self._offsets = (
                files.enter_context((self.directory / name).open(self._mode)) for name in (_TOKENS, _OFFSETS)
            )
            self._files = files.pop_all()
        return self

    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """Append sequences of token ids."""
        written = self.written
        for ids in sequences:
            self._ids.extend(ids)
            written.num_tokens += len(ids)
            self._ends.append(written.num_tokens)
        written.num_sequences += len(sequences)
        if len(self._ids) >= _BUFFERED_TOKENS:
            self._write()

    def _write(self) -> None:
        ids = np.asarray(self._ids, dtype=np.intc)
        self.written.max_id = max(self.written.max_id, int(ids.max(initial=-1)))
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self._offsets.write(np.asarray(self._ends, dtype=np.longlong).astype("<i8").tobytes())
        self._ids, self._ends = array("i"), array("q")

    def sync(self) -> None:
        """Wait until all that was added is on disk; a full disk may be found out only here."""
        self._write()
        for file in (self._tokens, self._offsets):
            file.flush()
            os.fsync(file.fileno())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._files:
            if kind is None:
                self.sync()
        if kind is None:
            meta = _Meta(
                fingerprint=self.fingerprint,
                dtype=self._dtype,
                **asdict(self.written),
                sha256={name: sampled_sha256(self.directory / name) for name in (_TOKENS, _OFFSETS)},
            )
            write_json(self.directory / _META, meta)


def sampled_sha256(path: Path) -> str:
    """Return the sha256 of a file's size and of 256 blocks of 64 KiB spread over it; of all of it below 16 MiB.

    It takes milliseconds whatever the size, and truncation and most alterations are still found.
    """
    size_bytes = path.stat().st_size
    digest = hashlib.sha256(str(size_bytes).encode())
    last_start = max(0, size_bytes - _SAMPLED_BLOCK_BYTES)
    num_blocks = min(_SAMPLED_BLOCKS, -(-size_bytes // _SAMPLED_BLOCK_BYTES))
    with path.open("rb") as file:
        for block in range(num_blocks):
            file.seek(block * last_start // max(1, num_blocks - 1))
            digest.update(file.read(_SAMPLED_BLOCK_BYTES))
    return digest.hexdigest()


def _read_meta(directory: Path) -> _Meta:
    path = directory / _META
    if not path.exists():
        raise DataError(f"{directory}: no token shards; meta.json is missing", "run `exlm tokenize`")
    try:
        return read_json(path, _Meta, hint=_REBUILD_HINT)
    except CheckpointError as error:
        raise DataError(error.message, error.hint) from error
