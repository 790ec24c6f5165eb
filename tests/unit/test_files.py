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

from exlm_cli import files
from exlm_cli.errors import CheckpointError, DataError
from exlm_cli.files import (
    JsonModel,
    absent_if_none,
    folder_for_results,
    make_folder,
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


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomically(path, b"old")
    monkeypatch.setattr(files.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(CheckpointError, match=f"{path}.*No space left") as caught:
        write_atomically(path, b"new")
    assert caught.value.hint == "free some space"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert path.read_bytes() == b"old"


def test_a_folder_whose_name_is_taken_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/sub"):
        with pytest.raises(CheckpointError, match=str(tmp_path / name)) as caught:
            make_folder(tmp_path / name)
        assert "`--out DIR`" in caught.value.hint


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, number):
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(CheckpointError, match=os.strerror(number)), folder_for_results(tmp_path / "a", tmp_path / "f"):
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


@pytest.mark.parametrize(("existing", "left"), [("", []), ("a", ["a"]), ("a/b", ["a", "a/b"])])
def test_a_folder_made_for_work_that_fails_is_deleted(tmp_path, existing, left):
    (tmp_path / existing).mkdir(parents=True, exist_ok=True)
    with pytest.raises(ValueError, match="the work failed"), folder_for_results(tmp_path / "a/b"):
        raise ValueError("the work failed")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == left


def test_files_of_another_process_stay_in_a_folder_made_for_work_that_fails(tmp_path):
    other = tmp_path / "a" / "other.csv"
    with pytest.raises(ZeroDivisionError), folder_for_results(tmp_path / "a/b"):
        assert 1 / other.write_bytes(b"") == 0
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["a", "a/other.csv"]


def test_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_text("old")
    for second in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=[None, second]))
        with pytest.raises((CheckpointError, KeyboardInterrupt)):
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
    write_json(path, Content(names=(), inner=Inner(value=0.1), note="x"))
    assert json.loads(path.read_text())["note"] == "x"
    assert read_json(path, Content).note == "x"
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
