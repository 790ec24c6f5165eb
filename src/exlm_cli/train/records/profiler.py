"""A trace of some steps by torch's profiler, in the Chrome format, for `exlm pretrain --profile`."""

from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from exlm_cli.files import refusing
from exlm_cli.progress import Progress
from exlm_cli.train.task import Callback

PROFILE_FOLDER = "profile"
_SKIPPED = 10
"""Steps that are not traced: the first ones load kernels, take memory and compile."""


class StepProfiler(Callback):
    """Traces some steps of a run, with what the loop does between them: rows of the log, validations, checkpoints.

    Args:
        num_steps: How many; fewer if the run ends before.
        progress: Told where the trace is.
    """

    def __init__(self, num_steps: int, progress: Progress) -> None:
        self._num_steps, self._progress = num_steps, progress
        self._folder, self._first, self._last = Path(), 0, 0
        self._profiler: profile | None = None

    def on_start(self, folder: Path, step: int) -> None:
        """Begin to count the steps."""
        self._folder, self._first, self._last = folder / PROFILE_FOLDER, step + _SKIPPED + 1, step
        on_cuda = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *on_cuda],
            schedule=schedule(wait=_SKIPPED - 1, warmup=1, active=self._num_steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._profiler.start()

    def on_step(self, step: int, loss: Tensor) -> None:
        """Follow a step; write the trace after the last of them."""
        del loss
        assert self._profiler is not None, "`on_start` comes first"
        self._last = step
        self._profiler.step()

    def on_end(self, error: BaseException | None) -> None:
        """Write what is traced of a run that ends earlier, or say that nothing is."""
        del error
        if self._profiler is None:
            return
        if self._last < self._first:
            self._progress.message(f"no step is traced: the run ended before step {self._first}")
        self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        if self._last < self._first:
            return
        path = self._folder / f"steps-{self._first}-to-{self._last}.json.gz"
        with refusing(f"{path}: the trace cannot be written"):
            path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        self._progress.message(
            f"steps {self._first} to {self._last} are traced in {path}: open it in chrome://tracing, or at "
            "https://ui.perfetto.dev, which keeps it in the browser"
        )
