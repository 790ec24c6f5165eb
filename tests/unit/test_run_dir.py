"""Run directories: names, locks, `run.json`, logs cut by a kill. Expected values come from the file system."""

import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from exlm_cli import run_dir
from exlm_cli.errors import CheckpointError
from exlm_cli.run_dir import (
    MetricsLog,
    create_run_dir,
    describe_environment,
    find_newest_run,
    mark_resumable,
    read_metrics,
    read_run_json,
    run_directory,
    sole_process,
    update_run_json,
)


def test_a_run_without_a_folder_is_named_by_recipe_and_second(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "RUNS_ROOT", tmp_path)
    assert re.fullmatch(r"a-\d{8}-\d{6}", create_run_dir(None, "a").name)
    monkeypatch.setattr(run_dir.time, "strftime", lambda _: "20250101-000000")
    made = [create_run_dir(None, "a") for _ in range(3)]
    assert made == [tmp_path / f"a-20250101-000000{end}" for end in ("", "-2", "-3")]
    assert run_directory(made[0] / "checkpoints" / "step-3") == made[0]
    assert run_directory(tmp_path / "step-3") == tmp_path / "step-3"


def test_a_given_folder_is_made_with_its_parents_and_an_empty_one_is_taken(tmp_path):
    out = tmp_path / "x" / "y"
    assert create_run_dir(out, "a") == out
    (out / ".lock").touch()
    (out / ".beginning").unlink()
    assert create_run_dir(out, "a") == out
    mark_resumable(out)
    (out / "recipe.yaml").touch()
    with pytest.raises(CheckpointError, match="not empty") as caught:
        create_run_dir(out, "a")
    assert caught.value.hint == "choose another folder with `--out DIR`, or empty this one"


def test_what_a_process_killed_at_its_beginning_left_is_deleted_and_nothing_else(tmp_path):
    """Files of a user, and of a run that began and ended after this process looked, stay."""
    run = create_run_dir(tmp_path / "run", "a")
    (run / "run.json").write_text("{}")
    (run / ".seen.writing-1").touch()
    assert create_run_dir(run, "a") == run
    with sole_process(run, is_new=True):
        assert {path.name for path in run.iterdir()} == {".lock", ".beginning"}
        (run / "recipe.yaml").touch()
        mark_resumable(run)
    begun = create_run_dir(tmp_path / "begun", "a")
    (begun / "notes.md").touch()
    with pytest.raises(CheckpointError, match="not empty"):
        create_run_dir(begun, "a")
    for folder in (run, begun):
        with pytest.raises(CheckpointError, match="not empty"), sole_process(folder, is_new=True):
            pass
    assert (begun / "notes.md").exists()
    (run / "report").mkdir()
    for name in (".run.json.writing-7", "notes.txt", "report/.curves.svg.writing-7", "report/curves.png"):
        (run / name).touch()
    with sole_process(run, is_new=False):
        left = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    assert left == {".lock", "recipe.yaml", "notes.txt", "report", "report/curves.png"}


def _begin_and_fail(run: Path, *, is_new: bool = True, is_marked: bool = False) -> None:
    with sole_process(run, is_new=is_new):
        if is_marked:
            mark_resumable(run)
        (run / "recipe.yaml").touch()
        (run / "checkpoints").mkdir(exist_ok=True)
        raise KeyboardInterrupt


def test_work_that_fails_leaves_a_folder_that_was_there_and_a_run_that_can_be_resumed(tmp_path):
    mine, new = tmp_path / "mine", tmp_path / "new"
    mine.mkdir(mode=0o750)
    for folder in (mine, new):
        for _ in range(2):  # the second time as one that was killed left it
            create_run_dir(folder, "a")
        with pytest.raises(KeyboardInterrupt):
            _begin_and_fail(folder)
    assert list(tmp_path.rglob("*")) == [mine]
    assert mine.stat().st_mode & 0o777 == 0o750
    run = create_run_dir(tmp_path / "run", "a")
    for is_new in (True, False):
        with pytest.raises(KeyboardInterrupt):
            _begin_and_fail(run, is_new=is_new, is_marked=is_new)
        assert {path.name for path in run.iterdir()} == {".lock", "recipe.yaml", "checkpoints"}


def test_a_process_that_is_at_work_keeps_its_folder(tmp_path):
    run = create_run_dir(tmp_path / "run", "a")
    with sole_process(run, is_new=True):
        (run / "run.json").touch()
        create_run_dir(run, "a")
        with pytest.raises(CheckpointError, match="another process"), sole_process(run, is_new=True):
            pass
        assert (run / "run.json").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    """A file is in the place of `runs/`, or a link to a disk that is not mounted; or the disk is read-only."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "runs")
    for root in ("file", "link"):
        monkeypatch.setattr(run_dir, "RUNS_ROOT", tmp_path / root)
        with pytest.raises(CheckpointError, match="no run directory can be made there") as caught:
            create_run_dir(None, "a")
        assert "`--out DIR`" in caught.value.hint
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        create_run_dir(tmp_path / "new", "a")


def test_run_json_keeps_the_environments_a_run_was_continued_in(tmp_path, monkeypatch):
    environment = describe_environment()
    for commit in ("a", "a", "b", "b", "c"):
        changed = environment.model_copy(update={"git_commit": commit})
        monkeypatch.setattr(run_dir, "describe_environment", lambda changed=changed: changed)
        update_run_json(tmp_path, {"command": "pretrain"})
    info = read_run_json(tmp_path)
    assert info.git_commit == "c"
    assert [earlier.git_commit for earlier in info.earlier_environments or ()] == ["a", "b"]


@pytest.mark.parametrize("num_cut_bytes", [1, 33])
def test_rows_come_back_and_a_last_line_cut_by_a_kill_and_rows_beyond_a_step_are_left_out(tmp_path, num_cut_bytes):
    """What JSON lacks is null."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    first, second = {"step": 1, "loss": 0.1 + 0.2, "kind": "train"}, {"step": 2, "many": [float("nan"), float("inf")]}
    log.append(first)
    log.append(second)
    whole = log.path.read_bytes()
    assert read_metrics(log.path) == [first, {"step": 2, "many": [None, None]}]
    log.path.write_bytes(whole[:-num_cut_bytes])
    assert read_metrics(log.path) == [first]
    log.truncate_after(9)
    log.append(second)
    assert log.path.read_bytes() == whole
    log.truncate_after(1)
    assert read_metrics(log.path) == [first]


@pytest.mark.parametrize(
    "line",
    ["[1]", '{"loss": 1}', '{"step": 1e999}', '{"step": 1, "loss": "low"}', "[" * 100_000],
    ids=lambda line: line[:30],
)
def test_a_whole_line_that_is_no_row_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(CheckpointError, match=rf"^{path}: line 2 "):
        read_metrics(path)


def test_the_newest_fitting_run_is_found_at_any_depth_and_cells_do_not_count(tmp_path):
    assert find_newest_run(tmp_path / "none", lambda _: True) is None
    for age_s, name in ((30, "old"), (20, "grid/cell"), (10, "newest"), (5, "newest/cells/mlm/seed-1")):
        run = tmp_path / name
        run.mkdir(parents=True)
        update_run_json(run, {"command": "pretrain"})
        os.utime(run / "run.json", ns=(0, -age_s * 10**9 + 10**12))
    assert find_newest_run(tmp_path, lambda _: True) == tmp_path / "newest"
    assert find_newest_run(tmp_path, lambda run: run.name != "newest") == tmp_path / "grid" / "cell"
    assert find_newest_run(tmp_path, lambda _: False) is None
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to("../old")
    assert find_newest_run(tmp_path / "runs", lambda _: True) == tmp_path / "runs" / "linked"
    (tmp_path / "latest").symlink_to("newest")
    assert find_newest_run(tmp_path, lambda _: True) == tmp_path / "newest"


def test_metrics_that_do_not_exist_or_cannot_be_written_are_refused(tmp_path):
    path = tmp_path / "no" / "metrics.jsonl"
    for act in (lambda: read_metrics(path), lambda: MetricsLog(path).append({"step": 1})):
        with pytest.raises(CheckpointError, match=rf"^{path}: .*No such file or directory$"):
            act()
