"""Plain arrays of a run in `.npz` files: written without pickle, checked when they are read."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.errors import CheckpointError
from exlm_cli.files import read_whole, write_atomically

MAX_UNPACKING = 100
"""How many times its packed size a file above `FREE_BYTES` may have when it is unpacked."""
FREE_BYTES = 1 << 20


def write_arrays(path: Path, arrays: Mapping[str, Any], *, is_packed: bool = True) -> None:
    """Write arrays as `.npz`.

    Raises:
        CheckpointError: The file cannot be written.
    """
    buffer = io.BytesIO()
    (np.savez_compressed if is_packed else np.savez)(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def read_arrays(path: Path, hint: str, types: Mapping[str, tuple[str, int]], what: str) -> dict[str, NDArray[Any]]:
    """Return what `write_arrays` wrote.

    Args:
        hint: How to get the file back.
        types: Type and number of axes of each array.
        what: What the arrays are, in an error.

    Raises:
        CheckpointError: The file is missing or altered, or has other arrays.
    """
    content = read_whole(path, hint=hint)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            num_bytes = sum(member.file_size for member in archive.infolist())
        if num_bytes > max(FREE_BYTES, MAX_UNPACKING * len(content)):
            raise CheckpointError(f"{path}: unpacked, the file is over {MAX_UNPACKING} times larger", hint)
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in types}
    except (ValueError, KeyError, OSError, EOFError, MemoryError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(f"{path}: not readable as {what}: {error}", hint) from error
    if {name: (str(array.dtype), array.ndim) for name, array in arrays.items()} != dict(types):
        raise CheckpointError(f"{path}: not readable as {what}: arrays of other shapes or types", hint)
    return arrays
