"""Files are written whole or not at all, JSON is read as typed values, `~` means what it means in a shell."""

import csv
import errno
import json
import math
import os
import pwd
from pathlib import Path
from unittest.mock import Mock

import pytest

from exlm_cli.errors import CheckpointError, DataError
from exlm_cli.files import (
    JsonModel,
    absent_if_none,
    folder_for_results,
    read_json,
    write_atomically,
    write_csv,
    write_json,
    write_together,
)
from exlm_cli.paths import cache_root, expand_path
from exlm_cli.tasks.rows.table import read_table


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_written_file_has_the_mode_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "f", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(CheckpointError, match="Read-only"), folder_for_results(tmp_path / "a", tmp_path / "f"):
        pytest.fail("the work began")
    assert list(tmp_path.iterdir()) == []


def test_cells_with_line_ends_come_back_from_csv(tmp_path):
    """Python's reader and ours end a row at a carriage return, unless its cell is quoted."""
    path, rows = tmp_path / "a.csv", [["a\rb", "\r\n"], ["\n", "plain"], ["", "x,y"]]
    write_csv(path, ["one", "two\rnames"], rows)
    with path.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["one", "two\rnames"], *rows]
    assert read_table(path).column("one", "") == ("a\rb", "", "")
    assert path.read_bytes().endswith(b'"\n",plain\n,"x,y"\n')


def test_a_folder_made_for_work_that_fails_is_deleted_unless_it_was_there_or_another_process_wrote_into_it(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(ZeroDivisionError), folder_for_results(mine / "new/deep"):
        assert 1 / 0
    assert list(tmp_path.rglob("*")) == [mine]
    with pytest.raises(ZeroDivisionError), folder_for_results(mine / "new/deep"):
        assert 1 / (mine / "new/other.csv").write_bytes(b"")
    assert sorted(tmp_path.rglob("*")) == [mine, mine / "new", mine / "new/other.csv"]


def test_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for second, refusal in ((full, f"{tmp_path}/b: .*No space left"), (KeyboardInterrupt, None)):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=[None, second]))
        with pytest.raises((CheckpointError, KeyboardInterrupt), match=refusal):
            write_together({tmp_path / "a": b"new", tmp_path / "b": b"new"})
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}


class Inner(JsonModel):
    value: float | None


class Content(JsonModel):
    names: tuple[str, ...]
    inner: Inner
    note: str | None = absent_if_none()


def test_a_model_comes_back_from_its_file_and_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "c.json"
    write_json(path, Content(names=("a",), inner=Inner(value=math.inf)))
    assert json.loads(path.read_text()) == {"names": ["a"], "inner": {"value": None}}
    assert read_json(path, Content) == Content(names=("a",), inner=Inner(value=None))
    noted = Content(names=(), inner=Inner(value=0.1), note="x")
    write_json(path, noted)
    assert read_json(path, Content) == noted
    write_json(path, {"id-1": math.nan})
    assert json.loads(path.read_text()) == {"id-1": None}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{", "JSON"),
        ("[]", ""),
        ('{"inner": {"value": 1}}', "`names`"),
        ('{"names": [], "inner": {"value": "1"}}', "`inner.value`"),
        ('{"names": [], "inner": {"value": 1}, "other": 1}', "`other`"),
        (None, "No such file"),
    ],
)
def test_a_file_that_does_not_hold_the_model_is_refused_by_key(tmp_path, text, key):
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_json(path, Content, hint="a hint")
    assert caught.value.message.startswith(f"{path}: ")
    assert key in caught.value.message
    assert caught.value.hint == "a hint"


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without HOME and without an entry in the user database, as in many containers."""
    for name in ("HOME", "EXLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))


@pytest.mark.usefixtures("no_home")
def test_a_process_without_a_home_has_no_cache():
    with pytest.raises(DataError, match="`~`"):
        expand_path("~/x")
    with pytest.raises(DataError, match="no home folder") as caught:
        cache_root(None)
    assert "EXLM_CACHE_DIR" in caught.value.hint


def test_the_cache_is_the_first_of_four_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("EXLM_CACHE_DIR", "~/own")
    assert cache_root("~/given") == Path("/home/me/given")
    assert cache_root(None) == Path("/home/me/own")
    monkeypatch.delenv("EXLM_CACHE_DIR")
    assert cache_root(None) == Path("/xdg/exlm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(None) == Path("/home/me/.cache/exlm")
