"""What bad input leaves behind: nothing, or a run that can be continued. Sentences of errors are in `golden/`."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from exlm_cli.cli.app import main
from exlm_cli.train.checkpoint import verify_checkpoint
from tests.cli.conftest import TINY

SETS = [word for value in TINY for word in ("--set", value)]
PRETRAIN = ["pretrain", "--recipe", "quickstart-text", *SETS]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(folder: Path) -> None:
    """Run every test of this file there."""


def test_a_disk_that_fills_up_under_a_checkpoint_leaves_none_and_the_run_can_be_continued(folder):
    """The file system really refuses: no file of the process may grow beyond 60 kB, which a checkpoint does."""
    assert main([*PRETRAIN, "--out", "before"]) == 0
    script = "import sys; from exlm_cli.cli.app import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, *PRETRAIN, "--out", "run"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: run/checkpoints/step-2: " in done.stderr
    assert "File too large" in done.stderr
    assert list((folder / "run" / "checkpoints").iterdir()) == []
    assert main(["pretrain", "--resume", "run"]) == 0
    assert verify_checkpoint(folder / "run" / "checkpoints" / "step-4") is None
    weights = [
        (folder / run / "checkpoints" / "step-4" / "model.safetensors").read_bytes() for run in ("before", "run")
    ]
    assert weights[0] == weights[1]
    # and not with another recipe
    before = (folder / "run" / "recipe.yaml").read_bytes()
    assert main(["pretrain", "--resume", "run", "--set", "optim.lr=0.5"]) == 2
    assert (folder / "run" / "recipe.yaml").read_bytes() == before
