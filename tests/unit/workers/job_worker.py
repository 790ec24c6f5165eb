"""A worker whose jobs take no time and end in every way that a job can end; started as a process, without torch."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from exlm_cli.errors import DataError, DivergedError, InterruptedRunError
from exlm_cli.files import write_atomically
from exlm_cli.train.process import StopSignal
from exlm_cli.workers.pool import serve


def tell(folder, values, progress):
    """Say what this process is like, and that it works on this job."""
    os.write(1, b"a library speaks\n")
    progress.message(f"has {values['number']}")
    variables = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "EXLM_CACHE_DIR")}
    return {"folder": str(folder), "pid": os.getpid(), "leads": os.getsid(0) == os.getpid(), **values, **variables}


def refuse(folder, values, progress):
    raise DataError("a row is bad", "mend it, then continue with `exlm finetune --resume elsewhere`")


def diverge(folder, values, progress):
    raise DivergedError("the loss is nan", "lower the learning rate")


def crash(folder, values, progress):
    raise ValueError("a mistake of ours")


def wait(folder, values, progress):
    """Work until a signal comes."""
    with StopSignal() as stop:
        write_atomically(folder / values["file"], str(os.getpid()).encode())
        while stop.number is None:
            os.sched_yield()
    raise InterruptedRunError("stopped", "continue", signal.SIGTERM)


def stop(folder, values, progress):
    """End as where a signal came to this process alone."""
    raise InterruptedRunError("stopped", "continue", signal.SIGTERM)


def train(folder, values, progress):
    """Count steps, one of which has two parts, and work of unknown length."""
    with progress.bar("steps", 4, done=1) as steps:
        steps.update(2)
        with progress.bar("parts", 2) as parts:
            parts.update(1, loss="2.31")
            parts.update(2)
        with progress.bar("rows", None) as rows:
            rows.update(1_000)
        with suppress(DataError), progress.bar("parts", 2) as parts:
            refuse(folder, values, progress)
        steps.update(3)


def wait_for(folder, values, progress):
    """Return once the process that waits has begun to."""
    while not (Path(folder) / values["file"]).exists():
        os.sched_yield()


def end(folder, values, progress):
    """Leave half an answer behind."""
    os.write(int(sys.argv[1]), b'{"event": "don')
    os._exit(3)


def kill(folder, values, progress):
    """Die as where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


FUNCTIONS = {
    function.__name__: function for function in (tell, train, refuse, stop, diverge, crash, wait, wait_for, end, kill)
}


def by_name(folder, values, progress):
    """Do what the job says, so that the jobs of one list can end differently."""
    return FUNCTIONS[values["do"]](folder, values, progress)


if __name__ == "__main__":
    serve(FUNCTIONS | {"by_name": by_name})
