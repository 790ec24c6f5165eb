"""An error names the damaged compressed file; gzip is recognised by its content."""

import gzip
import lzma
import re

import pytest

from exlm_cli.data.rows.decode import open_file
from exlm_cli.errors import DataError


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_file_that_is_truncated_or_damaged_is_named(tmp_path, suffix, compress):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(b"".join(b"line %d\n" % (n * n) for n in range(5000)))[:-20])
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*truncated"), open_file(path) as file:
        file.read()
    path.write_bytes(compress(b"")[:10] + b"just plain text, long enough for a header\n" * 10)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*damaged"), open_file(path) as file:
        file.read()


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.txt", "a.jsonl.gz"])
@pytest.mark.parametrize("write", [gzip.compress, bytes])
def test_gzip_is_told_by_the_content_of_a_file_and_not_by_its_name(tmp_path, name, write):
    (tmp_path / name).write_bytes(write(b"smiles,y\nCCO,1\n"))
    with open_file(tmp_path / name) as file:
        assert file.read() == b"smiles,y\nCCO,1\n"
