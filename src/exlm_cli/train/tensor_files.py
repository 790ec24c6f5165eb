"""Tensors of a checkpoint in safetensors files: one file, or sharded by rows with a file per rank.

torch.distributed.checkpoint keeps the index of shards as a pickle, which is unsafe to read from a file of unknown
origin; here it is JSON in the manifest. Any number of ranks can read what any other number has written.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from exlm_cli.distributed.parallel import whole
from exlm_cli.distributed.ranks import Ranks
from exlm_cli.errors import CheckpointError
from exlm_cli.files import ALTERED_HINT

Rows = dict[str, tuple[int, int]]
"""Name of a tensor -> first row in a file, and number of rows of the whole tensor; tensors not in it are whole."""


@dataclass(frozen=True)
class Part:
    """What one rank writes of a set of tensors; `rows` is None where the file holds them whole."""

    file: str
    tensors: dict[str, Tensor]
    rows: Rows | None = None


def part_of(stem: str, tensors: Mapping[str, Tensor], ranks: Ranks, *, is_sharded: bool) -> Part | None:
    """Return what this rank writes of tensors, on the CPU; None where rank 0 alone writes.

    Args:
        stem: Name of the file without its ending.
        tensors: By name; where one is sharded, all ranks must call this.
        ranks: All ranks.
        is_sharded: Every rank writes its rows; else rank 0 writes everything.
    """
    if is_sharded:
        own: dict[str, Tensor] = {}
        rows: Rows = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                first, last = _own_rows(tensor)
                if first < last:
                    own[name], rows[name] = _on_cpu(tensor.to_local()), (first, tensor.shape[0])
            elif ranks.is_first:
                own[name] = _on_cpu(tensor)
        return Part(shard_file(stem, ranks.rank, ranks.size), own, rows)
    complete: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor)
        if ranks.is_first:
            complete[name] = _on_cpu(gathered)
    return Part(f"{stem}.safetensors", complete) if ranks.is_first else None


def shard_file(stem: str, index: int, count: int) -> str:
    """Return the name of the file of one of `count` ranks."""
    return f"{stem}-{index + 1:05}-of-{count:05}.safetensors"


class SavedTensors:
    """Tensors in one or several files, read row by row; float16 is read as float32 where that is wanted.

    Args:
        files: Paths of the files, each with the rows that it holds of tensors that are not whole in it.

    Attributes:
        shapes: Shape of each whole tensor.
    """

    def __init__(self, files: Iterable[tuple[Path, Rows | None]]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, list[tuple[int, int, Path]]] = {}
        for path, rows in files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (it is not a mapping)
                    shape = tuple(file.get_slice(name).get_shape())
                    first, total = (rows or {}).get(name, (0, shape[0] if shape else 0))
                    self.shapes[name] = (total, *shape[1:]) if shape else ()
                    last = first + (shape[0] if shape else 0)
                    self._places.setdefault(name, []).append((first, last, path))

    def copy_to(self, name: str, target: Tensor) -> None:
        """Copy a tensor into one of the same shape, or into this rank's rows of it.

        Raises:
            CheckpointError: It has another shape or dtype, or rows are missing.
        """
        if self.shapes[name] != tuple(target.shape):
            raise CheckpointError(
                f"{self._file_of(name)}: `{name}` has shape {self.shapes[name]}, the model needs {tuple(target.shape)}",
                ALTERED_HINT,
            )
        local = target.to_local() if isinstance(target, DTensor) else target
        if not self.shapes[name]:
            local.copy_(self._read(name, self._file_of(name), slice(None), local.dtype))
            return
        first, last = _own_rows(target) if isinstance(target, DTensor) else (0, target.shape[0])
        done = first
        for start, stop, path in sorted(self._places[name]):
            if start <= done < min(stop, last):
                upto = min(stop, last)
                local[done - first : upto - first].copy_(
                    self._read(name, path, slice(done - start, upto - start), local.dtype)
                )
                done = upto
        if done < last:
            folder = self._file_of(name).parent
            raise CheckpointError(f"{folder}: rows {done} to {last} of `{name}` are in no file", ALTERED_HINT)

    def _file_of(self, name: str) -> Path:
        return self._places[name][0][2]

    def _read(self, name: str, path: Path, rows: slice, dtype: torch.dtype) -> Tensor:
        with _opened(path) as file:
            content: Tensor = file.get_tensor(name) if not self.shapes[name] else file.get_slice(name)[rows]
        if content.dtype == torch.float16 and dtype == torch.float32:
            content = content.float()  # exact: `copy_weights` rounds models that travel in the package
        if content.dtype != dtype:
            raise CheckpointError(f"{path}: `{name}` is {content.dtype}, the model needs {dtype}", ALTERED_HINT)
        return content


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; whatever is wrong with it is an error that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: the tensors cannot be read: {error}", ALTERED_HINT) from error


def _own_rows(tensor: DTensor) -> tuple[int, int]:
    """Return the rows [first, last) of this rank's share: ranks take equal chunks in order, the last ones fewer."""
    total, mesh = tensor.shape[0], tensor.device_mesh
    chunk = -(-total // mesh.size())
    first = min(total, mesh.get_local_rank() * chunk)
    last = min(total, first + chunk)
    assert tensor.to_local().shape[0] == last - first, "FSDP2 cuts the first axis into equal chunks"
    return first, last


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
