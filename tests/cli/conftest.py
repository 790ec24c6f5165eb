"""A current directory and a cache for each command that a test runs; small runs that tests only read."""

import shutil
from pathlib import Path

import pytest

from tests.shared import shared
from tests.tiny_sweeps import work_in_this_process
from tests.unit.finetune.finetuned_runs import make_runs

# a model and data so small that a command takes a second or two
TINY = (
    "device=cpu", "data.bundled_rows=200", "model.width=32", "model.ffn_width=16", "model.num_layers=1",
    "optim.warmup_steps=1", "train.alignment_backend=reference",
    "train.max_steps=4", "train.checkpoint_every_steps=2", "train.batch_sequences=4",
)  # fmt: skip


@pytest.fixture
def tiny() -> list[str]:
    """Return the words that make a quickstart recipe tiny."""
    return [word for value in TINY for word in ("--set", value)]


@pytest.fixture(autouse=True)
def _no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as into a pipe: workers of pytest-xdist have a $COLUMNS."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _blank_figures(blank_figures: None) -> None:
    """Draw nothing."""


@pytest.fixture
def cells_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process for the cells of a sweep."""
    work_in_this_process(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current directory; beside it is the `own_cache`."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of `make_runs`, which nothing alters."""
    return shared(tmp_path_factory, "made", make_runs)


@pytest.fixture
def run_folder(folder: Path, made: Path) -> Path:
    """Return the current directory, with one-letter links to the runs of `made`."""
    link_runs(folder, made)
    return folder


def link_runs(folder: Path, made: Path) -> None:
    """Make links `M`, `R` and `Q` to fine-tuned runs, `P` and `T` to pre-trained ones of SMILES and text."""
    runs = {"M": "molecules/run", "R": "rte/run", "Q": "squad/run", "P": "smiles/pretrained", "T": "text"}
    for name, target in runs.items():
        (folder / name).symlink_to(made / target)


def own_copy(folder: Path, name: str) -> Path:
    """Put a copy, which a test may alter, in the place of the link to a run."""
    run = (folder / name).resolve()
    (folder / name).unlink()
    return shutil.copytree(run, folder / name)
