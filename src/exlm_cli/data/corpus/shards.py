"""Token shards: sequences of token ids on disk, memory-mapped, written once and renamed into place.

A shard directory holds `tokens.bin` (uint16, or int32 if the vocabulary needs it), `offsets.bin` (int64, one more
than sequences) and `meta.json`. Little-endian, no pickle.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, final

import numpy as np
from numpy.typing import NDArray

from exlm_cli.errors import CheckpointError, DataError
from exlm_cli.files import JsonModel, read_json, write_json

IntArray = NDArray[np.int64]

_META, _TOKENS, _OFFSETS = "meta.json", "tokens.bin", "offsets.bin"
_SAMPLED_BLOCK_BYTES, _SAMPLED_BLOCKS = 1 << 16, 256
_MAX_PENDING_SEQUENCES = 4096
_REBUILD_HINT = "delete the directory and run `exlm tokenize`"


class _Meta(JsonModel):
    """Content of `meta.json`; `sha256` by file, see `sampled_sha256`."""

    format: Literal[1] = 1
    fingerprint: str
    dtype: Literal["<u2", "<i4"]
    num_sequences: int
    num_tokens: int
    sha256: dict[str, str]


@final
class TokenDataset:
    """Token sequences without [CLS] and [SEP] at their ends, read from disk on demand.

    Attributes:
        tokens: (num_tokens,) all sequences end to end, memory-mapped.
        offsets: (N + 1,) where each sequence begins, memory-mapped.
        num_tokens: Tokens of all sequences.
        fingerprint: Hash of everything that went into the shards.
    """

    def __init__(self, directory: Path) -> None:
        """Open a shard directory.

        Raises:
            DataError: It is missing, truncated or altered.
        """
        self.directory = directory
        meta = _read_meta(directory)
        self.fingerprint = meta.fingerprint
        self.num_tokens = meta.num_tokens
        dtype = np.dtype(meta.dtype)
        sizes_bytes = {_TOKENS: self.num_tokens * dtype.itemsize, _OFFSETS: (meta.num_sequences + 1) * 8}
        for name, size_bytes in sizes_bytes.items():
            _check_file(directory / name, size_bytes, meta.sha256.get(name, ""))
        self.tokens: NDArray[Any] = np.memmap(directory / _TOKENS, dtype=dtype, mode="r")
        self.offsets: IntArray = np.memmap(directory / _OFFSETS, dtype="<i8", mode="r")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> IntArray:
        """(N,) tokens of each sequence."""
        ends: IntArray = np.asarray(self.offsets)
        return ends[1:] - ends[:-1]

    def __getitem__(self, index: int) -> IntArray:
        """Return the (n,) token ids of one sequence."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        ids: IntArray = self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)
        return ids


@final
class ShardWriter:
    """Streams sequences into a shard directory, which appears only when it is complete.

    Use it as a context manager: leaving normally renames the finished directory into place, leaving by an exception or
    without a single sequence removes what was written.
    """

    def __init__(self, directory: Path, vocab_size: int, fingerprint: str) -> None:
        """Begin a shard directory.

        Args:
            directory: Where it will be; replaced if it exists.
            vocab_size: Bound of the ids; decides between uint16 and int32.
            fingerprint: Hash of everything that goes into the shards.
        """
        self.directory = directory
        self.fingerprint = fingerprint
        self.num_sequences = 0
        self.num_tokens = 0
        self._pending: list[Sequence[int]] = []
        self._dtype: Literal["<u2", "<i4"] = "<u2" if vocab_size <= 1 << 16 else "<i4"
        self._temporary = directory.with_name(f".{directory.name}.writing-{os.getpid()}")

    def __enter__(self) -> Self:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        with ExitStack() as files:
            self._tokens = files.enter_context((self._temporary / _TOKENS).open("wb"))
            self._offsets = files.enter_context((self._temporary / _OFFSETS).open("wb"))
            self._files = files.pop_all()
        self._offsets.write(np.zeros(1, "<i8").tobytes())
        return self

    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """Append sequences of token ids; none may be empty."""
        if not all(map(len, sequences)):
            raise ValueError("a sequence without tokens cannot be stored")
        self._pending += sequences
        self.num_sequences += len(sequences)
        if len(self._pending) >= _MAX_PENDING_SEQUENCES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        ends = self.num_tokens + np.cumsum([len(sequence) for sequence in self._pending])
        self._offsets.write(ends.astype("<i8").tobytes())
        self._tokens.write(np.concatenate([np.asarray(s, self._dtype) for s in self._pending]).tobytes())
        self.num_tokens = int(ends[-1])
        self._pending = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._files:
                if kind is None:
                    self._flush()
                    for file in (self._tokens, self._offsets):
                        # a full disk may be found out only here
                        file.flush()
                        os.fsync(file.fileno())
            if kind is None and self.num_sequences:
                self._finish()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _finish(self) -> None:
        meta = _Meta(
            fingerprint=self.fingerprint,
            dtype=self._dtype,
            num_sequences=self.num_sequences,
            num_tokens=self.num_tokens,
            sha256={name: sampled_sha256(self._temporary / name) for name in (_TOKENS, _OFFSETS)},
        )
        write_json(self._temporary / _META, meta)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._temporary.rename(self.directory)


def sampled_sha256(path: Path) -> str:
    """Return the sha256 of a file's size and of 256 blocks of 64 KiB spread over it; of all of it below 16 MiB.

    Opening shards of any size takes milliseconds this way, and truncation and most alterations are still found.
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


def _check_file(path: Path, size_bytes: int, sha256: str) -> None:
    if not path.is_file():
        raise DataError(f"{path}: missing from the token shards", _REBUILD_HINT)
    found_bytes = path.stat().st_size
    if found_bytes != size_bytes:
        raise DataError(
            f"{path}: {found_bytes} bytes, expected {size_bytes}; the token shards are truncated", _REBUILD_HINT
        )
    if sampled_sha256(path) != sha256:
        raise DataError(f"{path}: its content is not what was written; the token shards are altered", _REBUILD_HINT)
