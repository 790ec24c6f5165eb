"""Files of arrays: what was written is read again, and what is no such file is refused in one line."""

import io
import math
import pickle
import re
import zipfile

import numpy as np
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.baselines.arrays import FREE_BYTES, read_arrays, write_arrays

TYPES = {"numbers": ("float64", 1), "places": ("int32", 2)}
NUMBERS, PLACES = np.array([0.5, math.nan]), np.array([[1, 2]], dtype=np.int32)


@pytest.mark.parametrize("is_packed", [True, False])
def test_arrays_are_read_as_they_were_written(tmp_path, is_packed):
    write_arrays(tmp_path / "a.npz", {"numbers": NUMBERS, "places": PLACES}, is_packed=is_packed)
    read = read_arrays(tmp_path / "a.npz", "try again", TYPES, "numbers")
    np.testing.assert_array_equal(read["numbers"], NUMBERS)
    np.testing.assert_array_equal(read["places"], PLACES)


def claiming_petabytes() -> bytes:
    """Return an archive of a small member whose header claims 8 PB."""
    header, packed = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("numbers.npy", header.getvalue())
    return packed.getvalue()


@pytest.mark.parametrize(
    ("arrays", "finding"),
    [
        (None, "could not be read"),
        (b"PK\3\4 no archive", "not readable as numbers: "),
        (claiming_petabytes(), "not readable as numbers: "),
        ({"numbers": NUMBERS}, "not readable as numbers: "),
        # an empty array of objects is pickled, which is not unpickled
        ({"numbers": np.array([pickle], dtype=object)[:0], "places": PLACES}, "not readable as numbers: "),
        ({"numbers": NUMBERS.astype(np.float32), "places": PLACES}, "arrays of other shapes or types"),
        ({"numbers": NUMBERS, "places": PLACES[0]}, "arrays of other shapes or types"),
        ({"numbers": np.zeros(FREE_BYTES // 8 + 1), "places": PLACES}, "over 100 times larger"),
    ],
    ids=["missing", "no archive", "a lie", "one array", "objects", "another type", "another number of axes", "a bomb"],
)
def test_what_is_no_such_file_is_refused(tmp_path, arrays, finding):
    path = tmp_path / "a.npz"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        write_arrays(path, arrays)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: .*{finding}") as refused:
        read_arrays(path, "try again", TYPES, "numbers")
    assert refused.value.hint == "try again"
