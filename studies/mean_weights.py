"""A run whose weights are a mean of two: one that was trained on, and the one that it began with.

What a training on other rows has cost on the old ones comes back in part, more than it gives up of what was learned
("Robust fine-tuning of zero-shot models", arXiv 2109.01903). The new folder is the run that was trained on, with a
checkpoint of the mean; it can be read by every command, and cannot be resumed.

    python studies/mean_weights.py TRAINED_ON BEGAN_WITH --share 0.667 --out RUN
"""

import argparse
import shutil
from pathlib import Path

import torch

from exlm_cli.cli.console import open_progress
from exlm_cli.errors import CheckpointError, ExlmError
from exlm_cli.export.hub import copy_run
from exlm_cli.export.source import pretrained_source
from exlm_cli.progress import Progress
from exlm_cli.train.checkpoint import load_state, save_weights
from exlm_cli.train.pretrained import load_pretrained


def write_mean(trained_on: Path, began_with: Path, share: float, out: Path, progress: Progress) -> Path:
    """Write `share` * weights of `trained_on` + (1 - `share`) * those of `began_with`, and return the checkpoint.

    Raises:
        CheckpointError: The two have other weights, or a file cannot be read or written.
    """
    source = pretrained_source(load_pretrained(trained_on, device="cpu", progress=progress))
    new = source.model.state_dict()
    old = load_pretrained(began_with, device="cpu", progress=progress).model.state_dict()
    if {name: tensor.shape for name, tensor in new.items()} != {name: tensor.shape for name, tensor in old.items()}:
        raise CheckpointError(f"{began_with}: other weights than {trained_on}", "give the run that it began with")
    with torch.no_grad():
        for name, tensor in new.items():
            tensor.copy_(share * tensor + (1 - share) * old[name])
    (checkpoint,) = source.weights
    state = load_state(checkpoint).model_copy(update={"validation": {}})
    copy_run(source, out)
    shutil.rmtree(out / checkpoint.relative_to(source.run))
    return save_weights(out, state.loop.step, source.model, state, resume_command="none")


def main() -> None:
    """Read the words of the command line and write the mean."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trained_on", type=Path)
    parser.add_argument("began_with", type=Path)
    parser.add_argument("--share", type=float, required=True, help="of the weights that were trained on")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        print(write_mean(given.trained_on, given.began_with, given.share, given.out, open_progress()))
    except ExlmError as error:
        raise SystemExit(f"error: {error.message}\n\nhint: {error.hint}") from error


if __name__ == "__main__":
    main()
