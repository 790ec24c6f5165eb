"""A changed input is another input, however it hides the change; an unchanged one is not read twice."""

import hashlib
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from exlm_cli.data.corpus import fingerprint
from exlm_cli.data.corpus.fingerprint import fingerprint_sources, without_copies
from exlm_cli.data.corpus.inputs import BundledSource, FileSource, Source
from exlm_cli.data.rows.hub import HubSource
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder


def _content(source: Source, cache: Path) -> str:
    (identified,) = fingerprint_sources([source], cache, SilentProgress())
    return identified.content


def _file(path: Path, text: str) -> FileSource:
    path.write_text(text)
    return FileSource(path, len(text))


def test_a_change_that_keeps_size_and_date_is_seen(tmp_path, monkeypatch):
    reads = Mock(wraps=hashlib.file_digest)
    monkeypatch.setattr(hashlib, "file_digest", reads)
    source = _file(tmp_path / "a.txt", "hello")
    before = source.path.stat()
    first = _content(source, tmp_path / "cache")
    assert _content(source, tmp_path / "cache") == first
    assert reads.call_count == 1, "an unchanged file is read once"
    while source.path.stat().st_ctime_ns == before.st_ctime_ns:  # the change time of the kernel counts in ticks
        source.path.write_text("jello")
    os.utime(source.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.path.stat().st_mtime_ns == before.st_mtime_ns
    assert _content(source, tmp_path / "cache") != first
    assert reads.call_count == 2


def test_a_file_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: No such file or directory$"):
        fingerprint_sources([FileSource(tmp_path / "a.txt", 1)], tmp_path, SilentProgress())
    monkeypatch.setattr(hashlib, "file_digest", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: Input/output error$"):
        fingerprint_sources([_file(tmp_path / "a.txt", "x")], tmp_path, SilentProgress())


def test_the_fingerprint_of_a_hub_data_set_is_its_revision(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "find_revision", lambda *_: "abc123")
    source = HubSource("me/corpus", None, "train")
    assert _content(source, tmp_path) == "hub:me/corpus@train abc123"
    (known,) = fingerprint_sources([source], tmp_path, SilentProgress())
    assert known.source == HubSource("me/corpus", None, "train", "abc123")


def test_a_file_is_read_once_under_whatever_names(tmp_path):
    """Content and format decide; data that the package generates count once too."""
    contents = {"a.txt": "row\n", "b.txt": "another row\n", "c.txt": "row\n", "d.smi": "row\n"}
    files = [_file(tmp_path / name, content) for name, content in contents.items()]
    progress = Recorder()
    sources = [BundledSource("grammar"), *files, BundledSource("grammar")]
    kept = without_copies(fingerprint_sources(sources, tmp_path / "cache", progress), progress)
    assert [known.source for known in kept] == [BundledSource("grammar"), files[0], files[1], files[3]]
    assert progress.said == [
        f"{tmp_path}/c.txt has the content of {tmp_path}/a.txt: it is left out",
        "bundled:grammar has the content of bundled:grammar: it is left out",
    ]
