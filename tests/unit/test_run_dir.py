"""Run directories: names, atomic writes, metrics cut by a kill. Expected values come from the file system itself."""

import errno
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from exlm_cli import run_dir
from exlm_cli.errors import CheckpointError
from exlm_cli.run_dir import (
    MetricsLog,
    create_run_dir,
    find_newest_run,
    folder_for_results,
    make_folder,
    package_version,
    read_metrics,
    read_run_json,
    removed_on_failure,
    source_commit,
    update_run_json,
    write_atomically,
)


def test_a_run_without_a_folder_is_named_by_recipe_and_time(tmp_path: Path) -> None:
    made = create_run_dir(None, "text-base", root=tmp_path)
    assert made.parent == tmp_path
    assert re.fullmatch(r"text-base-\d{8}-\d{6}", made.name)


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir.time, "strftime", lambda _: "20250101-000000")
    made = [create_run_dir(None, "a", root=tmp_path).name for _ in range(3)]
    assert made == ["a-20250101-000000", "a-20250101-000000-2", "a-20250101-000000-3"]


def test_a_given_folder_is_made_with_its_parents_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    out = tmp_path / "x" / "y"
    assert create_run_dir(out, "a") == out
    assert create_run_dir(out, "a") == out
    assert list(out.iterdir()) == []


def test_a_folder_that_holds_the_lock_of_a_killed_grid_alone_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert create_run_dir(tmp_path, "a") == tmp_path
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(CheckpointError, match=r": the run directory is not empty$"):
        create_run_dir(tmp_path, "a")


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(CheckpointError) as caught:
        create_run_dir(tmp_path, "a")
    assert caught.value.message == f"{tmp_path}: the run directory is not empty"
    assert caught.value.hint == f"continue that run with `--resume {tmp_path}`, or choose another `--out`"


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        create_run_dir(tmp_path / "file" / "run", "a")
    assert caught.value.message == f"{tmp_path / 'file' / 'run'}: no run directory can be made there: Not a directory"
    way_out = "move away what has that name or choose a folder that you may write to with `--out`"
    assert caught.value.hint == way_out


def test_a_root_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"no run directory can be made there: Not a directory$"):
        create_run_dir(None, "a", root=tmp_path / "file")


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(CheckpointError) as caught:
        create_run_dir(tmp_path, "a")
    assert caught.value.message == f"{tmp_path}: no run directory can be made there: Read-only file system"


def test_when_every_name_of_a_second_is_taken_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(_: Path, parents: bool) -> None:
        raise FileExistsError

    monkeypatch.setattr(Path, "mkdir", taken)
    with pytest.raises(CheckpointError, match=r"no run directory can be made there: File exists$"):
        create_run_dir(None, "a", root=tmp_path)


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

    monkeypatch.setattr(run_dir.os, "fsync", disk_full)
    with pytest.raises(CheckpointError) as caught:
        write_atomically(path, b"new")
    assert caught.value.message == f"{path}: the file could not be written: No space left on device"
    assert caught.value.hint == "free some space"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert path.read_bytes() == b"old"


def test_a_file_of_a_folder_that_is_not_there_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the file could not be written: No such file or directory$"):
        write_atomically(tmp_path / "no" / "f", b"x")


def test_run_json_gathers_fields_and_tells_the_versions_without_importing_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from exlm_cli.run_dir import update_run_json as u\n"
        "p = Path(sys.argv[1]); u(p, {'seed': 1, 'loss': float('nan')}); u(p, {'steps': 5})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    content = read_run_json(tmp_path)
    assert (content["seed"], content["steps"], content["loss"]) == (1, 5, None)
    assert content["torch_version"] == metadata.version("torch")
    assert content["python_version"] == ".".join(map(str, sys.version_info[:3]))


def test_run_json_keeps_the_environments_a_run_was_continued_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for commit in ("a", "a", "b", "b", "c"):
        monkeypatch.setattr(run_dir, "describe_environment", lambda commit=commit: {"git_commit": commit})
        update_run_json(tmp_path, {"seed": 1})
    assert read_run_json(tmp_path) == {
        "git_commit": "c", "seed": 1, "earlier_environments": [{"git_commit": "a"}, {"git_commit": "b"}],
    }  # fmt: skip


def test_run_json_is_empty_where_there_is_none(tmp_path: Path) -> None:
    assert read_run_json(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "holds a list, a JSON object is expected"),
    ],
)
def test_an_altered_run_json_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_run_json(tmp_path)
    assert caught.value.message == f"{tmp_path / 'run.json'}: {message}"


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    assert package_version("exlm-no-such-distribution") is None


def test_the_commit_is_that_of_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(run_dir.__file__).parent
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    if asked.returncode:
        assert source_commit() is None
    else:
        assert (source_commit() or "").removesuffix("-dirty") == asked.stdout.strip()
    monkeypatch.setattr(run_dir.shutil, "which", lambda _: None)
    assert source_commit() is None


def test_a_package_inside_somebody_elses_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "run_dir.py").touch()
    monkeypatch.setattr(run_dir, "__file__", str(tmp_path / "run_dir.py"))
    assert source_commit() is None


def test_rows_come_back_as_they_were_added(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    rows = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 0.1 + 0.2, "kind": "train"}]
    for row in rows:
        log.append(row)
    assert read_metrics(log.path) == rows


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "perplexity": float("inf"), "many": [float("nan"), 1.0]})
    assert json.loads(log.path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "perplexity": None,
        "many": [None, 1.0],
    }


@pytest.mark.parametrize("num_cut_bytes", range(1, 24))
def test_a_last_line_cut_anywhere_by_a_kill_is_left_out(tmp_path: Path, num_cut_bytes: int) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 1.5})
    log.append({"step": 2, "loss": 1.25})
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-num_cut_bytes])
    assert [row["step"] for row in read_metrics(log.path)] == [1]
    log.truncate_after(9)
    log.append({"step": 2, "loss": 1.25})
    assert log.path.read_bytes() == whole


def test_rows_beyond_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append({"step": step})
    log.truncate_after(3)
    assert [row["step"] for row in read_metrics(log.path)] == [1, 2, 3]


def test_truncating_a_log_that_has_not_begun_makes_no_file(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").truncate_after(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}', '{"step": null}', "5"])
def test_a_whole_line_that_is_no_row_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(CheckpointError) as caught:
        read_metrics(path)
    assert caught.value.message == f"{path}: line 2 is not a row of metrics"


def test_metrics_that_are_not_there_or_cannot_be_added_are_told(tmp_path: Path) -> None:
    path = tmp_path / "no" / "metrics.jsonl"
    with pytest.raises(CheckpointError) as caught:
        read_metrics(path)
    assert caught.value.message == f"{path}: not readable: No such file or directory"
    with pytest.raises(CheckpointError) as caught:
        MetricsLog(path).append({"step": 1})
    assert caught.value.message == f"{path}: a row could not be added: No such file or directory"


def test_the_newest_fitting_run_is_found_at_any_depth(tmp_path: Path) -> None:
    assert find_newest_run(tmp_path / "none", lambda _: True) is None
    for age_s, name in ((30, "old"), (20, "grid/cell"), (10, "newest")):
        run = tmp_path / name
        run.mkdir(parents=True)
        update_run_json(run, {})
        os.utime(run / "run.json", ns=(0, -age_s * 10**9 + 10**12))
    assert find_newest_run(tmp_path, lambda _: True) == tmp_path / "newest"
    assert find_newest_run(tmp_path, lambda run: run.name != "newest") == tmp_path / "grid" / "cell"
    assert find_newest_run(tmp_path, lambda _: False) is None


def test_a_cell_of_a_grid_is_no_run_of_its_own(tmp_path: Path) -> None:
    for name in ("grid", "grid/cells/mlm/seed-1", "cells/mine"):
        (tmp_path / name).mkdir(parents=True)
        update_run_json(tmp_path / name, {})
    found: list[Path] = []
    find_newest_run(tmp_path, lambda run: bool(found.append(run)))  # type: ignore[func-returns-value]
    assert sorted(found) == [tmp_path / "cells/mine", tmp_path / "grid"]


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
