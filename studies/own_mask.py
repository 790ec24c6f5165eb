"""Own-mask share and clone shares of each start of the DAG before training, and a figure of where targets fall.

The head is the real one with Q K' = 0, so that its start alone decides the edges. Everything is exact: emissions are
equal, and the posterior is that of the alignment op. The script writes `results/own_mask.csv` and the figure.

    python studies/own_mask.py --figure docs/images/start-of-the-dag.png
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from exlm_cli.config.sections import ModelConfig, TransitionConfig
from exlm_cli.data.batch import Batch, batch_from_masked_ids
from exlm_cli.files import write_atomically
from exlm_cli.model.transition import TransitionHead
from exlm_cli.ops.alignment import alignment_posterior
from exlm_cli.ops.path_prior import own_mask_share, path_length_nll
from exlm_cli.report.style import (
    MARKERS,
    RUN_COLOURS,
    SPINE_INK,
    add_legend,
    drawing,
    new_figure,
    render_figure,
    set_up_axes,
)
from rows import RESULTS_DIR

STARTS = ("formula", "next_mask")
NUM_MASKS, NUM_STATES = (6, 19, 77, 308), (2, 4, 8)
SHOWN = (77, 4)
"""T and k of the figure: those of the paper's text models."""
_PAD, _CLS, _SEP, _MASK = 0, 1, 2, 3
_WIDTH = 8


def start_of(start: str, num_masks: int, k: int) -> tuple[Float[Tensor, "1 S S"], Batch]:
    """Return log E of a start at its default strength, and the batch of one sequence of masks that it is for."""
    num_nodes = num_masks * k + 2
    ids = np.array([[_CLS, *[_MASK] * num_masks, _SEP]])
    batch = batch_from_masked_ids(ids, mask_id=_MASK, pad_id=_PAD, num_states_per_mask=k, expands_input=True)
    config = ModelConfig(
        num_layers=1, num_heads=1, width=_WIDTH, ffn_width=_WIDTH, 
        transition=TransitionConfig.model_validate({"start": start}),
    )  # fmt: skip
    head = TransitionHead(config, k)
    with torch.no_grad():
        head.query.weight.zero_()
        head.query.bias.zero_()
        return head(torch.zeros(1, num_nodes, _WIDTH), batch), batch


def state_posterior(start: str, num_masks: int, k: int) -> Float[Tensor, "T T k"]:
    """Return the probability that a target (first axis) falls on a clone of a mask (second and third axis)."""
    log_trans, batch = start_of(start, num_masks, k)
    emissions = torch.zeros(1, num_masks, log_trans.shape[-1])
    posterior_TS = alignment_posterior(emissions, log_trans, batch.target_lengths, batch.state_lengths)[0]
    return posterior_TS[:, 1:-1].unflatten(1, (num_masks, k))


def mask_posterior(start: str, num_masks: int, k: int) -> Float[Tensor, "T T"]:
    """Return the probability that a target (row) falls on a mask (column)."""
    return state_posterior(start, num_masks, k).sum(-1)


def clone_shares(start: str, num_masks: int, k: int) -> Float[Tensor, " k"]:
    """Return the share of the targets that each clone emits; they add up to 1."""
    return state_posterior(start, num_masks, k).sum(1).mean(0)


def draw(path: Path, num_masks: int, k: int) -> None:
    """Write the figure: the mean mask of every target, and all masks of the target in the middle."""
    masks = torch.arange(1, num_masks + 1)
    middle = num_masks // 2
    posteriors = {start: mask_posterior(start, num_masks, k) for start in STARTS}
    with drawing():
        caption = "Exact, with emissions that are all alike. The grey line is a target's own mask."
        figure = new_figure(7.4, 3.0, f"Where targets fall before training: T = {num_masks} masks, k = {k}", [caption])
        means, spread = figure.subplots(1, 2)
        set_up_axes(means, "target", "mean mask that emits it")
        set_up_axes(spread, "mask", f"share of target {middle + 1} that it emits")
        own = means.plot(masks, masks, color=SPINE_INK, linewidth=4)[0]
        spread.axvline(middle + 1, color=SPINE_INK, linewidth=4)
        lines = []
        for colour, marker, posterior in zip(RUN_COLOURS, MARKERS, posteriors.values(), strict=False):
            means.plot(masks, posterior @ masks.float(), color=colour, linewidth=1.4)
            shown = posterior[middle].where(posterior[middle] > 1e-4, torch.nan)
            lines += spread.plot(masks, shown, color=colour, linewidth=1.2, marker=marker, markersize=3)
        spread.set_yscale("log")
        spread.yaxis.set_major_formatter("{x:g}")  # of logarithms, powers are drawn as mathematical text
        add_legend(means, [own, *lines], ["own mask", *STARTS], loc="lower right")
        write_atomically(path, render_figure(figure, ["png"])["png"])


def rows(num_masks: Sequence[int], num_states: Sequence[int]) -> list[tuple[str, int, int, str, str, str, str]]:
    """Return start, T, k, own-mask share, nats a target for the length of a path, share of the first and last clone."""
    found = []
    for start in STARTS:
        for masks in num_masks:
            for k in num_states:
                log_trans, batch = start_of(start, masks, k)
                lengths = batch.target_lengths, batch.state_lengths
                share = float(own_mask_share(log_trans, batch.node_mask, *lengths))
                length_nll = float(path_length_nll(log_trans, *lengths)) / masks
                first, *_, last = clone_shares(start, masks, k).tolist()
                found.append((start, masks, k, f"{share:.4f}", f"{length_nll:.4f}", f"{first:.4f}", f"{last:.4f}"))
    return found


def main() -> None:
    """Write the table, and the figure where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path, help="PNG to write")
    options = parser.parse_args()
    path = RESULTS_DIR / "own_mask.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        measured = ["own_mask_share", "length_nats_per_target", "first_clone_share", "last_clone_share"]
        writer.writerow(["start", "num_masks", "num_states_per_mask", *measured])
        writer.writerows(rows(NUM_MASKS, NUM_STATES))
    print(path)
    if options.figure is not None:
        draw(options.figure, *SHOWN)
        print(options.figure)


if __name__ == "__main__":
    main()
