"""Workers as processes: what they are given, how their jobs end, and that nothing else is run."""

import filelock
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.workers import pool as module
from exlm_cli.workers.pool import Job, Pool, do_job, request_of, worker_environments
from tests.unit.workers.job_worker import FUNCTIONS

WORKER = "tests.unit.workers.job_worker"


def _job(folder, **values):
    return Job("the job", folder, values, "row", "column")


@pytest.mark.parametrize(
    ("visible", "workers", "expected"),
    [(None, None, ["0", "1"]), ("3,5", None, ["3", "5"]), ("3,5", 3, ["3", "5", "3"])],
)
def test_each_cuda_device_has_its_worker(monkeypatch, visible, workers, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environments = worker_environments("cuda", num_threads=None, workers=workers)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == expected


def test_a_cpu_has_a_worker_of_one_thread_for_each_core(monkeypatch):
    monkeypatch.setattr(module.loky, "cpu_count", lambda: 3)
    for num_threads, workers, expected in (
        (None, None, ["1"] * 3),
        (2, None, ["2"]),
        (4, None, ["4"]),
        (None, 5, ["1"] * 5),
    ):
        environments = worker_environments("cpu", num_threads=num_threads, workers=workers)
        assert [environment["OMP_NUM_THREADS"] for environment in environments] == expected


def test_a_worker_may_count_on_the_cores_of_its_threads_alone(monkeypatch):
    """So a job that asks for workers of its own gets one."""
    (environment,) = worker_environments("cpu", num_threads=None, workers=1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert len(worker_environments("cpu", num_threads=None, workers=None)) == 1


def test_a_worker_does_many_jobs_on_its_own_device_and_what_it_prints_goes_to_its_log(tmp_path, monkeypatch):
    """It leads a session of its own, so that Ctrl-C in a terminal reaches the parent alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("EXLM_CACHE_DIR", "a cache")
    logs = tmp_path / "logs"
    with Pool(WORKER, [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}], logs) as pool:
        answers = {}
        for round_number in (1, 2):
            for number in range(pool.size):
                pool.submit(number, "tell", _job(tmp_path, number=round_number))
            for _ in range(pool.size):
                number, event = pool.next_event(600.0)
                answers[number, round_number] = event["value"]
    assert len(answers) == 4
    for (number, round_number), value in answers.items():
        assert value == {
            "folder": str(tmp_path),
            "pid": answers[number, 1]["pid"],
            "leads": True,
            "number": round_number,
            "CUDA_VISIBLE_DEVICES": ("3", "5")[number],
            "EXLM_CACHE_DIR": "a cache",
        }
    said = "a library speaks\nthe job: has 1\na library speaks\nthe job: has 2\n"
    assert [pool.log(number).read_text() for number in (0, 1)] == [said, said]


def test_the_bars_of_a_job_tell_how_much_of_it_is_done(tmp_path):
    events = []
    do_job(request_of("train", _job(tmp_path)), FUNCTIONS, events.append)
    assert [event["share"] for event in events[:-1]] == [2 / 4, 2.5 / 4, 3 / 4, 2 / 4, 3 / 4]
    assert events[-1] == {"event": "done", "value": None}


def test_what_lies_in_the_current_directory_is_never_run(tmp_path, monkeypatch):
    """The worker ends by itself, with code 0, once its input is closed; a broken module would end it with code 1."""
    (tmp_path / "queue.py").write_text("from pathlib import Path; Path('it-ran').touch(); raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    with Pool(WORKER, [{}], tmp_path / "logs") as pool:
        child = pool._children[0]
        assert child.stdin is not None
        child.stdin.close()
        event = pool.next_event(600.0)
    assert event == (0, {"event": "exit", "code": 0}), pool.log(0).read_text()
    assert not (tmp_path / "it-ran").exists()


def test_the_last_answer_may_be_cut_and_a_dead_worker_takes_a_job_without_an_error(tmp_path):
    with Pool(WORKER, [{}], tmp_path / "logs") as pool:
        pool.submit(0, "tell", _job(tmp_path, number=1))
        assert pool.next_event(600.0)[1]["event"] == "done"
        pool.submit(0, "end", _job(tmp_path))
        assert pool.next_event(600.0) == (0, {"event": "exit", "code": 3})
        pool.submit(0, "tell", _job(tmp_path, number=2))
        pool.interrupt()
        assert pool.next_event(0.0) is None


def test_no_worker_is_started_while_one_of_a_killed_parent_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_EARLIER_TIMEOUT_S", 0.0)
    logs = tmp_path / "run/workers"
    logs.mkdir(parents=True)
    with filelock.FileLock(logs / "worker-3.lock"):
        refused = pytest.raises(CheckpointError, match=f"^{tmp_path}/run: a worker of an earlier start is still at ")
        with refused, Pool(WORKER, [{}], logs):
            pass
    assert not (logs / "worker-0.log").exists()
    with Pool(WORKER, [], logs) as pool:
        assert pool.size == 0
