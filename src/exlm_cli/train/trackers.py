"""Experiment trackers of `train.report_to`: callbacks that send a run's metrics to TensorBoard or W&B.

A tracker gets the recipe and every row of `metrics.jsonl`, as `train/loss`, `valid/loss`, `valid_at/5/loss` and so on;
it gets no terminal output and no code. If a tracker fails during a run, it is left out from then on and training
continues.
"""

import importlib
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from exlm_cli.config.base import Recipe
from exlm_cli.config.sections import TrackerName
from exlm_cli.errors import ConfigError
from exlm_cli.files import describe_json_error, hash_json
from exlm_cli.progress import Progress
from exlm_cli.run_dir import read_run_json
from exlm_cli.train.task import Callback

PROJECT = "exlm"
"""Project of W&B where `WANDB_PROJECT` names none."""

_ANSWER_LIMIT_S = 20


class Tracker(Callback):
    """Base of the trackers.

    Args:
        recipe: Sent at the start.
        run: Run directory.
        title: Name of the run; for fine-tuning with its seed.
        group: Name that the seeds of one fine-tuning share.
        progress: Gets messages about what does not work.
    """

    name: ClassVar[TrackerName]
    module: ClassVar[str]

    def __init__(self, recipe: Recipe, run: Path, title: str, group: str, progress: Progress) -> None:
        self._settings, self._run_dir = recipe.model_dump(mode="json"), run
        self._title, self._group, self._progress = title, group, progress
        self._package = importlib.import_module(self.module)
        self._is_open = False

    def on_start(self, folder: Path, step: int) -> None:
        """Begin a run in the tracker, or continue the one that this folder began."""
        self._is_open = True
        self._guard(lambda: self._open(folder, step))

    def on_log(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics."""
        group = f"{row['kind']}/{row['at']:g}" if "at" in row else row["kind"]
        metrics = {f"{group}/{name}": value for name, value in row.items() if name not in ("kind", "step", "at")}
        self._guard(lambda: self._send(metrics, row["step"]))

    def on_end(self, error: BaseException | None) -> None:
        """Close the run in the tracker."""
        self._guard(lambda: self._close(error))
        self._is_open = False

    @abstractmethod
    def _open(self, folder: Path, step: int) -> None: ...

    @abstractmethod
    def _send(self, metrics: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def _close(self, error: BaseException | None) -> None: ...

    @abstractmethod
    def _failures(self) -> tuple[type[Exception], ...]:
        """Return the exceptions of a tracker that cannot be reached or written."""

    def _guard(self, action: Callable[[], None]) -> None:
        if not self._is_open:
            return
        try:
            action()
        except BaseException as error:
            self._is_open = False  # also for `on_end`, where an interrupted `_open` left nothing to close
            if not isinstance(error, self._failures()):
                raise
            reason = str(error).strip().partition("\n")[0]
            if isinstance(error, ValidationError):
                reason = describe_json_error(error)
            self._progress.message(
                f"warning: logging to {self.name} has stopped: {reason}; metrics.jsonl has all metrics"
            )


class TensorBoardTracker(Tracker):
    """Event files in `tensorboard/` of the run."""

    name = "tensorboard"
    module = "torch.utils.tensorboard"

    def _open(self, folder: Path, step: int) -> None:
        # a killed run may have written beyond the checkpoint that this run continues
        self._writer = self._package.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def _send(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _close(self, error: BaseException | None) -> None:
        del error  # event files have no place for it
        self._writer.close()

    def _failures(self) -> tuple[type[Exception], ...]:
        return (OSError,)


class WandbTracker(Tracker):
    """A run of Weights & Biases; offline, in `wandb/` of the run, where there is no key."""

    name = "wandb"
    module = "wandb"

    def _open(self, folder: Path, step: int) -> None:
        del step  # wandb refuses rows before its last step, and a resumed run only repeats those
        self._run = self._package.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=self._title,
            group=self._group,
            id=self._id(folder),
            resume="allow",
            dir=str(folder),
            config=self._settings,
            mode=self._mode(),
            settings={
                "console": "off",
                "disable_code": True,
                "disable_git": True,
                "silent": True,
                "init_timeout": _ANSWER_LIMIT_S,
            },
        )

    def _id(self, folder: Path) -> str:
        """Return the id of what is trained in a folder, by which a resumption continues it: it follows from `run.json`.

        It outlives a move of the run, and another run that begins in the same place has another id.
        """
        info = read_run_json(self._run_dir)
        what = (self._settings["name"], info.seed, str(folder.relative_to(self._run_dir)))
        return hash_json([info.started_unix_s, *what])[:16]

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

    def _send(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def _close(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)

    def _failures(self) -> tuple[type[Exception], ...]:
        # a pydantic model checks WANDB_MODE and the other variables; its errors are ValueErrors
        return (self._package.Error, OSError, ValueError)


TRACKERS: dict[TrackerName, type[Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}


def require_trackers(names: Sequence[TrackerName]) -> None:
    """Check that a run can use its trackers, before anything that takes time.

    Raises:
        ConfigError: The package of one is not installed.
    """
    for name in names:
        try:
            importlib.import_module(TRACKERS[name].module)
        except ImportError as error:
            raise ConfigError(
                f"`train.report_to` names {name}, which is not installed ({error})", f"pip install {name}"
            ) from error


def build_trackers(
    names: Sequence[TrackerName], recipe: Recipe, run: Path, title: str, group: str, progress: Progress
) -> list[Callback]:
    """Return the trackers of a run; arguments as for `Tracker`."""
    return [TRACKERS[name](recipe, run, title, group, progress) for name in dict.fromkeys(names)]
