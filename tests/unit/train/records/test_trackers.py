"""Trackers against fakes of their packages: every row arrives, a resumption continues, and no failure ends a run."""

import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import ConfigError
from exlm_cli.run_dir import read_metrics
from exlm_cli.train.pretrain import resume_pretraining, run_pretraining
from exlm_cli.train.records.trackers import PACKAGES
from tests.recorder import Recorder
from tests.tiny import tiny_recipe
from tests.unit.finetune.synthetic import run_tiny


class Error(Exception):
    """What the packages raise."""


class Packages:
    """Mocks of both packages, and what they were given: (tracker, name of the figure, value, step)."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, float, int]] = []
        self.breaks_at = 10**9
        self.tensorboard = MagicMock()
        self.tensorboard.SummaryWriter.return_value.add_scalar = lambda name, value, step: self._note(
            "tensorboard", {name: value}, step
        )
        self.wandb = MagicMock(Error=Error)
        self.wandb.init.return_value.log = lambda figures, step: self._note("wandb", figures, step)

    def _note(self, tracker: str, figures: dict[str, float], step: int) -> None:
        if step >= self.breaks_at:
            raise Error("the server is gone\nand more")
        self.sent += [(tracker, name, value, step) for name, value in figures.items()]

    def of(self, tracker: str) -> list[tuple[str, float, int]]:
        return [row[1:] for row in self.sent if row[0] == tracker]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Packages:
    fakes = Packages()
    for name, package in PACKAGES.items():
        monkeypatch.setitem(sys.modules, package, getattr(fakes, name))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    return fakes


def _recipe(cache: Path, **train: Any) -> PretrainRecipe:
    intervals = {"validate_every_steps": 3, "checkpoint_every_steps": 3, "log_every_steps": 2}
    data = {"bundled_rows": 300, "cache_dir": str(cache)}
    return tiny_recipe(data=data, train={**intervals, "report_to": ["tensorboard", "wandb"], **train})


def _figures(run: Path, after_step: int = 0) -> list[tuple[str, float, int]]:
    return [
        ("/".join([*(str(row[key]) for key in ("kind", "at") if key in row), name]), value, row["step"])
        for row in read_metrics(run / "metrics.jsonl")
        if row["step"] > after_step
        for name, value in row.items()
        if name not in ("kind", "step", "at")
    ]


def test_each_tracker_gets_every_figure_and_a_resumption_continues_its_run(packages, cache, tmp_path):
    progress = Recorder()
    recipe = _recipe(cache, validate_at=[2, 0.5])
    run = run_pretraining(recipe, out=tmp_path / "run", progress=progress).run_dir
    for tracker in PACKAGES:
        assert packages.of(tracker) == _figures(run)
    assert {"valid_at/2/loss", "valid_at/0.5/loss"} <= {name for name, *_ in _figures(run)}
    board = packages.tensorboard.SummaryWriter
    board.assert_called_once_with(str(run / "tensorboard"), purge_step=1)
    wandb = packages.wandb.init.call_args.kwargs
    assert (wandb["mode"], wandb["project"], wandb["name"]) == ("offline", "exlm", "run")
    assert wandb["config"]["masking"]["mask_ratio"] == 0.3
    assert any("`wandb sync`" in line for line in progress.said)
    assert wandb["group"] == "tiny"
    packages.wandb.init.return_value.finish.assert_called_once_with(exit_code=0)
    shutil.rmtree(run / "checkpoints/step-6")
    packages.sent.clear()
    run = run.rename(tmp_path / "moved")
    resume_pretraining(run)
    for tracker in PACKAGES:
        assert packages.of(tracker) == _figures(run, after_step=3)
    # what a killed run wrote beyond its last checkpoint is hidden
    assert board.call_args.kwargs == {"purge_step": 4}
    again = packages.wandb.init.call_args.kwargs
    assert (again["id"], again["resume"]) == (wandb["id"], "allow")


def test_a_tracker_that_fails_is_left_alone_and_training_goes_on(packages, cache, tmp_path):
    packages.breaks_at, progress = 4, Recorder()
    recipe = _recipe(cache, report_to="wandb")
    result = run_pretraining(recipe, out=tmp_path / "run", progress=progress)
    assert result.steps == 6
    assert packages.of("wandb") == [row for row in _figures(result.run_dir) if row[2] < 4]
    (warning,) = [message for message in progress.said if message.startswith("warning: logging to wandb")]
    assert "the server is gone" in warning
    packages.wandb.init.return_value.finish.assert_not_called()


def test_wandb_is_online_with_a_key_unless_told_otherwise_and_no_key_is_written(packages, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    progress, recipe = Recorder(), _recipe(cache, report_to="wandb", max_steps=2)
    run = run_pretraining(recipe, out=tmp_path / "run", progress=progress)
    assert packages.wandb.init.call_args.kwargs["mode"] == "online"
    told = [str(packages.wandb.init.call_args), *progress.said]
    told += [path.read_text() for path in run.run_dir.glob("*.*") if path.is_file()]
    assert not any("secret" in text for text in told)
    monkeypatch.setenv("WANDB_MODE", "offline")
    resume_pretraining(run.run_dir)
    assert packages.wandb.init.call_args.kwargs["mode"] == "offline"


def test_a_tracker_that_is_not_installed_is_named_before_a_folder_is_made(packages, cache, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES["wandb"], None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^`train.report_to` names wandb, which is not installed \(") as caught:
        run_pretraining(_recipe(cache), out=tmp_path / "run")
    assert caught.value.hint == "pip install wandb"
    assert not (tmp_path / "run").exists()


def test_each_seed_of_a_fine_tuning_is_a_run_of_its_own(packages, text_model, tmp_path):
    train = {"max_epochs": 1, "report_to": ["wandb"], "log_every_steps": 1}
    run = tmp_path / "run"
    run_tiny(text_model, run, train=train)
    opened = [call.kwargs for call in packages.wandb.init.call_args_list]
    assert [(each["name"], each["group"]) for each in opened] == [("run: seed 1", "run"), ("run: seed 2", "run")]
    assert opened[0]["id"] != opened[1]["id"]
    cells = [run / f"cells/single/split-0/seed-{seed}" for seed in (1, 2)]
    assert packages.of("wandb") == [figure for cell in cells for figure in _figures(cell)]


def test_tensorboard_itself_reads_what_it_was_sent(cache, tmp_path):
    pytest.importorskip("tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = run_pretraining(_recipe(cache, report_to="tensorboard"), out=tmp_path / "run").run_dir
    events = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    read = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    assert read == {(name, step): pytest.approx(value, rel=1e-6) for name, value, step in _figures(run)}
