"""Files written whole or not at all, and what is said where they cannot be."""

import errno
import os
from pathlib import Path

import pytest

from exlm_cli import files
from exlm_cli.errors import CheckpointError
from exlm_cli.files import folder_for_results, make_folder, removed_on_failure, write_atomically


def test_a_new_folder_goes_when_its_filling_fails_and_an_old_one_stays(tmp_path: Path) -> None:
    for is_new in (True, False):
        folder = tmp_path / str(is_new)
        folder.mkdir()
        (folder / "half").touch()
        with pytest.raises(KeyboardInterrupt), removed_on_failure(folder, is_new=is_new):
            raise KeyboardInterrupt
        assert folder.exists() is not is_new
    with removed_on_failure(tmp_path):
        pass
    assert tmp_path.exists()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_written_file_has_the_mode_that_the_umask_asks_for(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "f", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")

    def disk_full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", disk_full)
    with pytest.raises(CheckpointError) as caught:
        write_atomically(path, b"new")
    assert caught.value.message == f"{path}: the file could not be written: No space left on device"
    assert caught.value.hint == "free some space"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert path.read_bytes() == b"old"


def test_a_file_of_a_folder_that_is_not_there_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the file could not be written: No such file or directory$"):
        write_atomically(tmp_path / "no" / "f", b"x")


def test_a_folder_for_results_is_made_with_those_it_lies_in_or_the_reason_told(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    for name, reason in (("file", "File exists"), ("file/sub", "Not a directory")):
        with pytest.raises(CheckpointError) as caught:
            make_folder(tmp_path / name)
        assert caught.value.message == f"{tmp_path / name}: no such folder can be made: {reason}"
        way_out = "move away what has that name or choose a folder that you may write to with `--out`"
        assert caught.value.hint == way_out


@pytest.mark.parametrize(
    ("number", "option", "hint"),
    [
        (errno.EROFS, "--predictions", "choose a folder that you may write to with `--predictions`"),
        (errno.ENOSPC, "--out", "free some space or choose a folder that you may write to with `--out`"),
    ],
)
def test_a_file_that_could_not_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, option: str, hint: str
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(CheckpointError) as caught, folder_for_results(tmp_path / "a", tmp_path / "a/f", option=option):
        pytest.fail("the work began")
    assert caught.value.message == f"{tmp_path / 'a/f'}: the file could not be written: {os.strerror(number)}"
    assert caught.value.hint == hint
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_can_be_written_is_left_as_it_is_until_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    with folder_for_results(tmp_path, tmp_path / "old", tmp_path / "new"):
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "old")]


@pytest.mark.parametrize(("there", "left"), [("", []), ("a", ["a"]), ("a/b", ["a", "a/b"])])
def test_a_folder_that_was_made_for_nothing_is_taken_back(tmp_path: Path, there: str, left: list[str]) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    was_there = []

    def work() -> None:
        with folder_for_results(tmp_path / "a/b"):
            was_there.append((tmp_path / "a/b").is_dir())
            raise ValueError("the work failed")

    with pytest.raises(ValueError, match="the work failed"):
        work()
    assert was_there == [True]
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == left
    with folder_for_results(tmp_path / "a/b"):
        pass
    assert (tmp_path / "a/b").is_dir()
