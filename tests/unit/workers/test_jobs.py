"""A list of jobs: the order, the table, what is kept, and each way it ends early."""

import dataclasses
import os
import signal
from pathlib import Path

import filelock
import pytest

from exlm_cli.errors import DataError, DivergedError, ExlmError, InterruptedRunError
from exlm_cli.progress import SilentProgress
from exlm_cli.train.process import StopSignal
from exlm_cli.workers.jobs import JobBoard, JobKind, run_jobs
from exlm_cli.workers.pool import Job
from tests.killed import run_until_killed
from tests.recorder import RecordedBar, RecordedBoard, Recorder

RESUME = "exlm sweep --resume run"


def describe(job, value):
    return str(job.work), f"has work {job.work}"


KIND = JobKind("tests.unit.workers.job_worker", "by_name", "cell", "Work", describe)


def job(name: str, folder: Path, do: str, work: float = 1.0, **values: object) -> Job:
    return Job(name, folder, {"do": do, "number": 0, **values}, name, "work", work)


def run(jobs, logs, *, workers=1, finished=(), kind=KIND):
    progress = Recorder()
    environments: list[dict[str, str]] = [{}] * workers
    given = {"finished": dict(finished), "environments": environments, "logs": logs, "resume": RESUME}
    run_jobs(jobs, kind, **given, progress=progress)
    return progress


def test_the_longest_job_is_done_first_and_a_finished_one_is_kept(tmp_path):
    jobs = [job(name, tmp_path, "tell", work) for name, work in (("a", 1.0), ("b", 3.0), ("c", 2.0), ("d", 4.0))]
    progress = run(jobs, tmp_path / "logs", finished={"d": "4.0"})
    assert progress.said == [
        "b: has work 3.0 (2 of 4 cells)", "c: has work 2.0 (3 of 4 cells)", "a: has work 1.0 (4 of 4 cells)",
    ]  # fmt: skip
    (table,), (bar,) = progress.boards, progress.bars
    assert (table.rows, table.columns, bar.begun_at) == (["a", "b", "c", "d"], ["work"], 40)
    assert table.cells == {(name, "work"): (f"{work}.0", True) for name, work in zip("abcd", (1, 3, 2, 4), strict=True)}
    assert {40, 70, 90, 100} <= {*bar.done}
    # where all is done no worker is started
    run(jobs, tmp_path / "none", finished=dict.fromkeys("abcd", ""))
    assert not (tmp_path / "none").exists()


def test_an_error_in_a_job_reaches_the_user_with_its_hint_and_stops_the_others(tmp_path):
    jobs = [job("long", tmp_path, "wait", 3.0, file="waits"), job("bad", tmp_path, "wait_for", 2.0, file="waits")]
    jobs.append(job("refused", tmp_path, "refuse"))
    with pytest.raises(DataError, match=r"^cell refused: a row is bad$") as caught:
        run(jobs, tmp_path / "logs", workers=2)
    assert caught.value.hint == f"mend it, then continue with `{RESUME}`"
    with pytest.raises(DivergedError, match=r"^cell nan: the loss is nan$") as diverged:
        run([job("nan", tmp_path, "diverge")], tmp_path / "logs")
    assert diverged.value.exit_code == 1


@pytest.mark.parametrize(
    ("do", "code", "log"), [("kill", -9, ""), ("end", 3, ""), ("crash", 1, "ValueError: a mistake of ours")]
)
def test_a_worker_that_dies_is_reported_with_its_code_and_log(tmp_path, do, code, log):
    logs = tmp_path / "logs"
    said = rf"^cell dead: its process ended with code {code}; its output is in {logs}/worker-0\.log$"
    with pytest.raises(ExlmError, match=said) as caught:
        run([job("dead", tmp_path, do), job("next", tmp_path, "tell")], logs)
    assert caught.value.hint.endswith(f"run fewer at once, as with `workers=1`; continue with `{RESUME}`")
    assert log in (logs / "worker-0.log").read_text()


def test_a_signal_to_one_worker_alone_names_its_job(tmp_path):
    with pytest.raises(ExlmError, match=r"^cell one was interrupted$") as caught:
        run([job("one", tmp_path, "stop")], tmp_path / "logs")
    assert caught.value.hint == f"continue with `{RESUME}`"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_every_job_and_says_how_to_continue(tmp_path, monkeypatch, number):
    class Stopped(StopSignal):
        """A signal that came before the first event."""

        def __enter__(self) -> "Stopped":
            super().__enter__()
            self._receive(number, None)
            return self

    monkeypatch.setattr("exlm_cli.workers.jobs.StopSignal", Stopped)
    jobs = [job("one", tmp_path, "wait", file="waits"), job("two", tmp_path, "tell")]
    with pytest.raises(InterruptedRunError, match=r"^stopped with 0 of 2 cells done; those that ran ") as caught:
        run(jobs, tmp_path / "logs")
    assert caught.value.exit_code == 128 + number
    assert caught.value.hint == f"continue with `{RESUME}`"


def run_and_die(folder: Path) -> None:
    """Run jobs in the process at hand, which dies when the first is done, while the second waits."""
    kind = dataclasses.replace(KIND, describe=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    jobs = [job("long", folder, "wait", 2.0, file="waits"), job("short", folder, "wait_for", file="waits")]
    run_jobs(
        jobs, kind, finished={}, environments=[{}, {}], logs=folder / "logs", resume=RESUME, progress=SilentProgress()
    )  # fmt: skip


def test_a_parent_that_is_killed_leaves_no_worker(tmp_path):
    run_until_killed(run_and_die, tmp_path)
    assert (tmp_path / "waits").exists()
    for number in (0, 1):
        with filelock.FileLock(tmp_path / f"logs/worker-{number}.lock", timeout=600.0):
            pass  # a worker holds it as long as it lives


def test_the_table_has_all_jobs_of_a_place_and_the_bar_weighs_jobs_by_their_work(tmp_path):
    jobs = [
        Job(f"{row}-{seed}", tmp_path, {}, row, "30%", work)
        for seed in (1, 2) for row, work in (("k = 1", 16.0), ("k = 2", 30.0))
    ]  # fmt: skip
    table, bar = RecordedBoard(["k = 1", "k = 2"], ["30%"]), RecordedBar("cells", 100, 17)
    board = JobBoard(jobs, {"k = 1-1": "2.78"}, "cell", table, bar)
    assert table.cells == {("k = 1", "30%"): ("2.78 ·", False), ("k = 2", "30%"): ("· ·", False)}
    board.look(jobs[1], 0.25)
    assert table.cells["k = 2", "30%"] == ("25 % ·", False)
    board.finish(jobs[1], "diverged")
    assert table.cells["k = 2", "30%"] == ("diverged ·", False)
    assert bar.fields == {"rate": "2 of 4 cells"}
    board.finish(jobs[3], "not defined")
    board.finish(jobs[2], "2.78")
    assert table.cells == {("k = 1", "30%"): ("2.78 2.78", True), ("k = 2", "30%"): ("diverged not defined", True)}
    assert bar.done == [100 * done // 92 for done in (16, 16 + 30 / 4, 16 + 30, 16 + 2 * 30, 92)]
