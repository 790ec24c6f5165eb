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
    describe_environment,
    find_newest_run,
    read_metrics,
    read_run_json,
    update_run_json,
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
    assert caught.value.hint == f"continue that run with `resume={tmp_path}`, or choose another folder with `out=DIR`"


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        create_run_dir(tmp_path / "file" / "run", "a")
    assert caught.value.message == f"{tmp_path / 'file' / 'run'}: no run directory can be made there: Not a directory"
    way_out = "move away what has that name or choose a folder that you may write to with `out=DIR`"
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


def test_run_json_gathers_fields_and_tells_the_versions_without_importing_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from exlm_cli.run_dir import update_run_json as u\n"
        "p = Path(sys.argv[1]); u(p, {'command': 'pretrain', 'seed': 1}); u(p, {'steps': 5})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    content = read_run_json(tmp_path)
    assert (content.seed, content.steps) == (1, 5)
    assert content.torch_version == metadata.version("torch")
    assert content.python_version == ".".join(map(str, sys.version_info[:3]))


def test_run_json_keeps_the_environments_a_run_was_continued_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = describe_environment()
    for commit in ("a", "a", "b", "b", "c"):
        changed = environment.model_copy(update={"git_commit": commit})
        monkeypatch.setattr(run_dir, "describe_environment", lambda changed=changed: changed)
        update_run_json(tmp_path, {"command": "pretrain"})
    info = read_run_json(tmp_path)
    assert info.git_commit == "c"
    assert [earlier.git_commit for earlier in info.earlier_environments or ()] == ["a", "b"]


@pytest.mark.parametrize("content", [None, "{", "[1]", "{}", '{"command": "pretrain", "of_another_version": 1}'])
def test_a_run_json_that_is_missing_altered_or_of_another_version_is_refused(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_run_json(tmp_path)
    assert caught.value.message.startswith(f"{tmp_path / 'run.json'}: ")
    assert caught.value.hint


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
        update_run_json(run, {"command": "pretrain"})
        os.utime(run / "run.json", ns=(0, -age_s * 10**9 + 10**12))
    assert find_newest_run(tmp_path, lambda _: True) == tmp_path / "newest"
    assert find_newest_run(tmp_path, lambda run: run.name != "newest") == tmp_path / "grid" / "cell"
    assert find_newest_run(tmp_path, lambda _: False) is None


def test_a_cell_of_a_grid_is_no_run_of_its_own(tmp_path: Path) -> None:
    for name in ("grid", "grid/cells/mlm/seed-1", "cells/mine"):
        (tmp_path / name).mkdir(parents=True)
        update_run_json(tmp_path / name, {"command": "pretrain"})
    found: list[Path] = []

    def refuse(run: Path) -> bool:
        found.append(run)
        return False

    find_newest_run(tmp_path, refuse)
    assert sorted(found) == [tmp_path / "cells/mine", tmp_path / "grid"]
