"""Experiment trackers of `train.report_to`: callbacks that send a run's metrics to TensorBoard or W&B.

A tracker gets the recipe and every row of `metrics.jsonl`, as `train/loss`, `valid/loss`, `valid_at/5/loss` and so on;
it gets no terminal output and no code.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from exlm_cli.config.base import Recipe
from exlm_cli.config.sections import TrackerName
from exlm_cli.errors import ConfigError
from exlm_cli.files import describe_json_error, hash_json
from exlm_cli.progress import Progress
from exlm_cli.run_dir import read_run_json
from exlm_cli.train.task import Callback

PACKAGES: dict[TrackerName, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""What is imported for a tracker, where a recipe names it."""

PROJECT = "exlm"
"""Project of W&B where `WANDB_PROJECT` names none."""


class Tracker(Callback):
    """Base of the trackers: one that fails is left out from then on, and training continues."""

    name: TrackerName
    failures: tuple[type[Exception], ...]

    def __init__(self, progress: Progress) -> None:
        self._progress, self._is_open = progress, False

    def on_start(self, folder: Path, step: int) -> None:
        """Begin a run in the tracker, or continue the one that this folder began."""
        self._is_open = True
        self._guard(self._open, folder, step)

    def on_log(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics."""
        group = f"{row['kind']}/{row['at']:g}" if "at" in row else row["kind"]
        metrics = {f"{group}/{name}": value for name, value in row.items() if name not in ("kind", "step", "at")}
        self._guard(self._send, metrics, row["step"])

    def on_end(self, error: BaseException | None) -> None:
        """Close the run in the tracker."""
        self._guard(self._close, error)
        self._is_open = False

    def _open(self, folder: Path, step: int) -> None: ...

    def _send(self, metrics: dict[str, float], step: int) -> None: ...

    def _close(self, error: BaseException | None) -> None: ...

    def _guard(self, method: Callable[..., None], *arguments: Any) -> None:
        if not self._is_open:
            return
        try:
            method(*arguments)
        except BaseException as error:
            self._is_open = False  # also for `on_end`, where an interrupted `_open` left nothing to close
            if not isinstance(error, self.failures):
                raise
            said = describe_json_error(error) if isinstance(error, ValidationError) else str(error).strip()
            reason = said.partition("\n")[0]
            self._progress.message(
                f"warning: logging to {self.name} has stopped: {reason}; metrics.jsonl has all metrics"
            )


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the run."""

    name, failures = "tensorboard", (OSError,)

    def _open(self, folder: Path, step: int) -> None:
        package = importlib.import_module(PACKAGES[self.name])
        # a killed run may have written beyond the checkpoint that this run continues
        self._writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def _send(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _close(self, error: BaseException | None) -> None:
        del error  # event files have no place for it
        self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases; offline, in `wandb/` of the run, where there is no key."""

    name = "wandb"

    def __init__(self, recipe: Recipe, run: Path, title: str, group: str, progress: Progress) -> None:
        super().__init__(progress)
        self._recipe, self._run_dir, self._title, self._group = recipe, run, title, group
        self._package = importlib.import_module(PACKAGES[self.name])
        # a pydantic model checks WANDB_MODE and the other variables; its errors are ValueErrors
        self.failures = (self._package.Error, OSError, ValueError)

    def _open(self, folder: Path, step: int) -> None:
        del step  # wandb refuses rows before its last step, and a resumed run only repeats those
        # a run that is continued has the same id, moved or not; another one that begins in its place has another
        info = read_run_json(self._run_dir)
        what = [info.started_unix_s, self._recipe.name, info.seed, str(folder.relative_to(self._run_dir))]
        quiet = {"console": "off", "disable_code": True, "disable_git": True, "silent": True}
        self._run = self._package.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=self._title,
            group=self._group,
            id=hash_json(what)[:16],
            resume="allow",
            dir=str(folder),
            config=self._recipe.model_dump(mode="json"),
            mode=self._mode(),
            settings={**quiet, "init_timeout": 20},  # seconds
        )

    def _mode(self) -> str:
        """Return `WANDB_MODE` if it is set; else offline without a key, for which wandb would ask."""
        from requests.utils import get_netrc_auth

        if mode := os.environ.get("WANDB_MODE"):
            return mode
        url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
        if os.environ.get("WANDB_API_KEY") or get_netrc_auth(url) is not None:
            return "online"
        self._progress.message(
            "wandb: there is no API key, so the run is recorded offline; `wandb sync` uploads it later"
        )
        return "offline"

    def _send(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def _close(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


def require_trackers(names: Sequence[TrackerName]) -> None:
    """Check that a run can use its trackers, before anything that takes time.

    Raises:
        ConfigError: The package of one is not installed.
    """
    for name in names:
        try:
            importlib.import_module(PACKAGES[name])
        except ImportError as error:
            raise ConfigError(
                f"`train.report_to` names {name}, which is not installed ({error})", f"pip install {name}"
            ) from error


def build_trackers(
    names: Sequence[TrackerName], recipe: Recipe, run: Path, title: str, group: str, progress: Progress
) -> list[Callback]:
    """Return the trackers that `train.report_to` names.

    Args:
        names, recipe, run: Of the run; the recipe is sent at the start, and `run` is its directory.
        title, group: Name of the run, of a fine-tuning with its seed; and that which its seeds share.
        progress: Gets messages about what does not work.
    """
    arguments = (recipe, run, title, group, progress)
    return [TensorBoard(progress) if name == "tensorboard" else WandB(*arguments) for name in dict.fromkeys(names)]
