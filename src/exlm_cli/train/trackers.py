"""Experiment trackers of `train.report_to`: callbacks that send a run's figures to TensorBoard, W&B or MLflow.

A tracker gets the recipe and every row of `metrics.jsonl`, as `train/loss`, `valid/loss` and so on; it gets no terminal
output and no code. If a tracker fails during a run, it is left out from then on and training continues.
"""

import importlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from exlm_cli.config.base import Recipe
from exlm_cli.config.overrides import changed_keys
from exlm_cli.config.sections import TrackerName
from exlm_cli.errors import ConfigError, InterruptedRunError
from exlm_cli.files import JsonModel, absent_if_none, describe_json_error, read_json, write_json
from exlm_cli.progress import Progress
from exlm_cli.train.task import Callback

PROJECT = "exlm"
"""Project of W&B and experiment of MLflow where `WANDB_PROJECT` and `MLFLOW_EXPERIMENT_NAME` name none."""

IDS_FILE = "trackers.json"
_ANSWER_LIMIT_S = 5.0
_MAX_PARAMETERS = 100  # in one request to MLflow


class TrackerIds(JsonModel):
    """`trackers.json`: ids of a run in its trackers, by which a resumption continues them."""

    wandb: str | None = absent_if_none()
    mlflow: str | None = absent_if_none()


class Tracker(Callback):
    """Base of the trackers.

    Args:
        recipe: Sent at the start.
        title: Name of the run; for fine-tuning with its seed.
        group: Name that the seeds of one fine-tuning share.
        progress: Gets messages about what does not work.

    Raises:
        ConfigError: The package is not installed.
    """

    name: ClassVar[TrackerName]
    module: ClassVar[str]

    def __init__(self, recipe: Recipe, title: str, group: str, progress: Progress) -> None:
        self._settings = recipe.model_dump(mode="json")
        self._title, self._group, self._progress = title, group, progress
        self._package = import_tracker(self.name)
        self._is_open = False

    def on_start(self, folder: Path, step: int) -> None:
        """Begin a run in the tracker, or continue the one that this folder began."""
        self._is_open = True
        self._guard(lambda: self._open(folder, step))

    def on_log(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics."""
        figures = {f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("kind", "step")}
        self._guard(lambda: self._send(figures, row["step"]))

    def on_end(self, error: BaseException | None) -> None:
        """Close the run in the tracker."""
        self._guard(lambda: self._close(error))
        self._is_open = False

    @abstractmethod
    def _open(self, folder: Path, step: int) -> None: ...

    @abstractmethod
    def _send(self, figures: Mapping[str, float], step: int) -> None: ...

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
                f"warning: logging to {self.name} has stopped: {reason}; metrics.jsonl has all figures"
            )


class TensorBoardTracker(Tracker):
    """Event files in `tensorboard/` of the run."""

    name = "tensorboard"
    module = "torch.utils.tensorboard"

    def _open(self, folder: Path, step: int) -> None:
        # a killed run may have written beyond the checkpoint that this run continues
        self._writer = self._package.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def _send(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _close(self, error: BaseException | None) -> None:
        del error  # event files have no place for it
        self._writer.close()

    def _failures(self) -> tuple[type[Exception], ...]:
        return (OSError,)


class WandbTracker(Tracker):
    """A run of Weights & Biases; offline, in `wandb/` of the run, where there is no key or no answer."""

    name = "wandb"
    module = "wandb"

    def _open(self, folder: Path, step: int) -> None:
        del step  # wandb refuses rows before its last step, and a resumed run only repeats those
        ids = _read_ids(folder)
        run_id = ids.wandb or os.urandom(8).hex()
        write_json(folder / IDS_FILE, ids.model_copy(update={"wandb": run_id}))
        self._run = self._package.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=self._title,
            group=self._group,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=self._settings,
            mode=self._mode(),
            settings={"console": "off", "disable_code": True, "disable_git": True, "silent": True},
        )

    def _mode(self) -> str:
        """Return `WANDB_MODE` if it is set; else offline without a key or a network, where wandb would ask or wait."""
        from requests.utils import get_netrc_auth

        if mode := os.environ.get("WANDB_MODE"):
            return mode
        url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
        has_key = bool(os.environ.get("WANDB_API_KEY")) or get_netrc_auth(url) is not None
        if has_key and _answers(url):
            return "online"
        reason = f"{urlsplit(url).hostname} does not answer" if has_key else "there is no API key"
        self._progress.message(f"wandb: {reason}, so the run is recorded offline; `wandb sync` uploads it later")
        return "offline"

    def _send(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def _close(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)

    def _failures(self) -> tuple[type[Exception], ...]:
        # a pydantic model checks WANDB_MODE and the other variables; its errors are ValueErrors
        return (self._package.Error, OSError, ValueError)


class MlflowTracker(Tracker):
    """A run of MLflow, where `MLFLOW_TRACKING_URI` says; without it, where MLflow keeps runs by default."""

    name = "mlflow"
    module = "mlflow"

    def _open(self, folder: Path, step: int) -> None:
        del step  # MLflow keeps both values of a step
        # a server that goes away must not hold up training: by default each request is tried again for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        # at its end it would print two links to stdout, before the result and the JSON of a command
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        self._client = self._package.MlflowClient()
        ids = _read_ids(folder)
        if ids.mlflow is not None:
            self._run_id = ids.mlflow
            self._client.update_run(self._run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        run = self._client.create_run(experiment, run_name=self._title, tags={"group": self._group})
        self._run_id = run.info.run_id
        write_json(folder / IDS_FILE, ids.model_copy(update={"mlflow": self._run_id}))
        parameter = self._package.entities.Param
        parameters = [parameter(key, str(value)) for key, (_, value) in changed_keys({}, self._settings).items()]
        for start in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MAX_PARAMETERS])

    def _send(self, figures: Mapping[str, float], step: int) -> None:
        metric, now_ms = self._package.entities.Metric, int(time.time() * 1000)
        self._client.log_batch(self._run_id, metrics=[metric(name, v, now_ms, step) for name, v in figures.items()])

    def _close(self, error: BaseException | None) -> None:
        status = "FINISHED" if error is None else "KILLED" if isinstance(error, InterruptedRunError) else "FAILED"
        self._client.set_terminated(self._run_id, status)

    def _failures(self) -> tuple[type[Exception], ...]:
        return (self._package.exceptions.MlflowException, OSError)


TRACKERS: dict[TrackerName, type[Tracker]] = {
    "tensorboard": TensorBoardTracker, "wandb": WandbTracker, "mlflow": MlflowTracker
}  # fmt: skip


def import_tracker(name: TrackerName) -> Any:
    """Return the package of a tracker.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(TRACKERS[name].module)
    except ImportError as error:
        raise ConfigError(
            f"`train.report_to` names {name}, which is not installed ({error})", f"pip install {name}"
        ) from error


def require_trackers(names: Sequence[TrackerName]) -> None:
    """Check that a run can use its trackers, before anything that takes time.

    Raises:
        ConfigError: One is not installed, or the MLflow server that `MLFLOW_TRACKING_URI` names does not answer.
    """
    for name in names:
        import_tracker(name)
    url = os.environ.get("MLFLOW_TRACKING_URI", "")
    if "mlflow" in names and url.startswith(("http://", "https://")) and not _answers(url):
        raise ConfigError(
            f"the MLflow server {url.rpartition('@')[2]} of MLFLOW_TRACKING_URI does not answer",
            "start it, unset the variable to keep runs here, or leave `mlflow` out of `train.report_to`",
        )


def build_trackers(
    names: Sequence[TrackerName], recipe: Recipe, title: str, group: str, progress: Progress
) -> list[Callback]:
    """Return the trackers of a run; arguments as for `Tracker`."""
    return [TRACKERS[name](recipe, title, group, progress) for name in dict.fromkeys(names)]


def _read_ids(folder: Path) -> TrackerIds:
    path = folder / IDS_FILE
    return read_json(path, TrackerIds) if path.is_file() else TrackerIds()


def _answers(url: str) -> bool:
    """Return whether a server answers at all, whatever it says."""
    import requests

    try:
        requests.head(url, timeout=_ANSWER_LIMIT_S)
    except (requests.RequestException, ValueError):  # urllib3's own, for a host name like `a..b`
        return False
    return True
