"""Jobs of workers, as processes: what they are given, the order, what is kept, and each way it ends early."""

import os
import signal
from pathlib import Path

import filelock
import pytest

from exlm_cli.errors import CheckpointError, DataError, ExlmError, InterruptedRunError
from exlm_cli.files import write_atomically
from exlm_cli.progress import SilentProgress
from exlm_cli.train import workers as module
from exlm_cli.train.process import StopSignal
from exlm_cli.train.workers import Job, run_jobs, worker_environments
from tests.killed import run_until_killed
from tests.recorder import Recorder

RESUME = "exlm sweep --resume run"


def do(what, folder, progress):
    """Do a job that takes no time, and ends as its name says."""
    match what:
        case "tell":
            os.write(1, b"a library speaks\n")
            progress.message("begins")
            with progress.bar("steps", 2) as bar:
                bar.update(1, loss="2.31")
            variables = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "EXLM_CACHE_DIR")}
            return {"pid": os.getpid(), "leads": os.getsid(0) == os.getpid(), **variables}
        case "wait":
            with StopSignal() as stop:
                write_atomically(folder / "waits", b"")
                while stop.number is None:
                    os.sched_yield()
            write_atomically(folder / "saved", b"")
            raise InterruptedRunError("stopped", "continue", signal.SIGTERM)
        case "wait for it":
            while not (folder / "waits").exists():
                os.sched_yield()
        case "refuse":
            raise DataError("a row is bad", "mend it, then continue with `exlm finetune --resume elsewhere`")
        case "err":
            raise ValueError("a mistake of ours")
        case "kill":  # as where memory runs out
            os.kill(os.getpid(), signal.SIGKILL)


def job(name: str, folder: Path, what: str, work: float = 1.0) -> Job:
    return Job(name, (what, folder), work)


def run(jobs, logs, *, environments=({},), finished=(), describe=lambda job, _: f"has work {job.work}", function=do):
    progress = Recorder()
    run_jobs(
        function, jobs, noun="cell", finished=finished, describe=describe, environments=environments, logs=logs,
        resume=RESUME, progress=progress,
    )  # fmt: skip
    return progress


@pytest.mark.parametrize(
    ("device", "visible", "num_threads", "workers", "expected"),
    [
        ("cuda", "", None, None, ["0", "1"]),
        ("cuda", "3,5", None, 3, ["3", "5", "3"]),
        ("cpu", "", None, None, ["1"] * 3),
        ("cpu", "", 2, None, ["2"]),
        ("cpu", "", None, 5, ["1"] * 5),
    ],
)
def test_each_cuda_device_or_core_has_its_worker(monkeypatch, device, visible, num_threads, workers, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(module.loky, "cpu_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environments = worker_environments(device, num_threads=num_threads, workers=workers)
    name = "CUDA_VISIBLE_DEVICES" if device == "cuda" else "OMP_NUM_THREADS"
    assert [environment[name] for environment in environments] == expected


def test_a_worker_does_many_jobs_on_its_own_device_and_what_it_prints_goes_to_its_log(tmp_path, monkeypatch):
    """The longest is first. It leads a session of its own, so that Ctrl-C in a terminal reaches the parent alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("EXLM_CACHE_DIR", "a cache")
    (tmp_path / "queue.py").write_text("from pathlib import Path; Path('it-ran').touch(); raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    told = {}

    def describe(job, value):
        told[job.name] = value
        return f"has work {job.work}"

    logs = tmp_path / "logs"
    jobs = [job(name, tmp_path, "tell", work) for name, work in (("a", 1.0), ("b", 3.0), ("c", 2.0), ("d", 4.0))]
    device = {"CUDA_VISIBLE_DEVICES": "5"}
    progress = run(jobs, logs, environments=[device], finished={"d"}, describe=describe)
    assert progress.said == [
        "b: has work 3.0 (2 of 4 cells)", "c: has work 2.0 (3 of 4 cells)", "a: has work 1.0 (4 of 4 cells)",
    ]  # fmt: skip
    (bar,) = progress.bars
    assert (bar.begun_at, bar.done, bar.fields) == (40, [70, 90, 100], {"rate": "4 of 4 cells"})
    expected = {"pid": told["a"]["pid"], "leads": True, **device, "EXLM_CACHE_DIR": "a cache"}
    assert list(told.values()) == [expected] * 3
    assert expected["pid"] != os.getpid()
    assert (logs / "worker-0.log").read_text() == "".join(f"a library speaks\n{name}: begins\n" for name in "bca")
    # what lies in the current directory is never run
    assert not (tmp_path / "it-ran").exists()
    # where all is done no worker is started
    run(jobs, tmp_path / "none", finished={*"abcd"})
    assert not (tmp_path / "none").exists()


def test_an_error_in_a_job_reaches_the_user_with_its_hint_and_stops_the_others(tmp_path):
    jobs = [job("long", tmp_path, "wait", 3.0), job("short", tmp_path, "wait for it", 2.0)]
    jobs.append(job("refused", tmp_path, "refuse"))
    with pytest.raises(DataError, match=r"^cell refused: a row is bad$") as caught:
        run(jobs, tmp_path / "logs", environments=[{}, {}])
    assert caught.value.hint == f"mend it, then continue with `{RESUME}`"
    assert (tmp_path / "saved").exists()


def test_a_worker_that_dies_is_one_error_that_names_its_job_and_log(tmp_path):
    log = tmp_path / "logs/worker-0.log"
    with pytest.raises(ExlmError, match=rf"^cell dead: its process died; its output is in {log}$") as caught:
        run([job("dead", tmp_path, "kill"), job("next", tmp_path, "tell")], log.parent)
    assert caught.value.hint.endswith(f"run fewer at once, as with `--workers 1`; continue with `{RESUME}`")


def test_a_signal_stops_every_job_and_says_how_to_continue(tmp_path):
    """The job that ends once the other one waits sends it."""

    def signal_us(*_):
        os.kill(os.getpid(), signal.SIGINT)
        return "done"

    jobs = [job("long", tmp_path, "wait", 2.0), job("short", tmp_path, "wait for it")]
    jobs.append(job("next", tmp_path, "tell", 0.5))
    # the workers get no job more
    with pytest.raises(InterruptedRunError, match=r"^stopped with 1 of 3 cells done; those that ran ") as caught:
        run(jobs, tmp_path / "logs", environments=[{}, {}], describe=signal_us)
    assert (tmp_path / "saved").exists()
    assert caught.value.exit_code == 128 + signal.SIGINT
    assert caught.value.hint == f"continue with `{RESUME}`"


def run_and_die(folder: Path) -> None:
    """Run jobs in the process at hand, which dies when the first is done, while the second waits."""
    jobs = [job("long", folder, "wait", 2.0), job("short", folder, "wait for it")]
    run_jobs(
        do, jobs, noun="cell", finished=(), describe=lambda *_: os.kill(os.getpid(), signal.SIGKILL),
        environments=[{}, {}], logs=folder / "logs", resume=RESUME, progress=SilentProgress(),
    )  # fmt: skip


def test_a_parent_that_is_killed_leaves_no_worker(tmp_path):
    run_until_killed(run_and_die, tmp_path)
    assert (tmp_path / "waits").exists()
    # the next start waits until the job that waits has ended
    assert run([job("next", tmp_path, "tell")], tmp_path / "logs").said == ["next: has work 1.0 (1 of 1 cells)"]
    assert not (tmp_path / "saved").exists()


def test_no_worker_is_started_while_one_of_a_killed_parent_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_EARLIER_TIMEOUT_S", 0.0)
    logs = tmp_path / "run/workers"
    logs.mkdir(parents=True)
    refused = pytest.raises(CheckpointError, match=f"^{tmp_path}/run: a worker of an earlier start is still at ")
    with filelock.FileLock(logs / "worker-3.lock"), refused:
        run([job("one", tmp_path, "tell")], logs)
    assert not (logs / "worker-0.log").exists()


def test_a_mistake_of_ours_is_in_the_log_with_its_traceback(tmp_path):
    log = tmp_path / "logs/worker-0.log"
    with pytest.raises(ExlmError, match=rf"^cell bad: ValueError: a mistake of ours; its output is in {log}$"):
        run([job("bad", tmp_path, "err")], log.parent)
    assert log.read_text().endswith("\nValueError: a mistake of ours\n")
