"""Entropy of predictions over mask ratios, models beside each other: a table, and a figure like Figure 12."""

import math
from collections.abc import Sequence
from pathlib import Path

from exlm_cli.experiments.scores import PredictionEntropy
from exlm_cli.files import make_folder
from exlm_cli.format import NO_VALUE, format_number, format_ratio
from exlm_cli.report.style import FAINT_INK, INK, RUN_COLOURS, drawing, new_figure, quieten, write_figure
from exlm_cli.report.tables import ReportTable

NamedEntropy = tuple[str, PredictionEntropy]
"""A model's name, and its figures at one masking."""

_PANEL_INCHES = (3.9, 3.1)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_OVER_STATES, _WEIGHTED = "mean over states", "posterior-weighted"
_DEFINITIONS = (
    f"{_OVER_STATES}: of (Repeated) MLM over tokens whose copies are all masked (App. E); of ExLM over all states of "
    "all masks",
    f"{_WEIGHTED}: of ExLM, each state by the probability that it emits a target, given the targets; of an MLM, whose "
    "masks have one state, the same as the other",
)


def entropy_table(entropies: Sequence[NamedEntropy]) -> ReportTable:
    """Return a row for each model and masking."""
    rows = [
        (
            name,
            str(_num_copies(entropy)),
            format_ratio(entropy.mask_ratio),
            format_number(entropy.entropy_bits),
            NO_VALUE if entropy.entropy_posterior_bits is None else format_number(entropy.entropy_posterior_bits),
            format_number(entropy.metrics["loss"]),
            format_number(entropy.metrics["mask_accuracy"]),
        )
        for name, entropy in entropies
    ]
    return ReportTable(
        "entropy",
        "Entropy of predictions, in bits",
        ("model", "k", "p", _OVER_STATES, _WEIGHTED, "loss", "accuracy"),
        (tuple(rows),),
        (
            "k: states of a mask (ExLM) or copies of a token (Repeated MLM); p: mask ratio; accuracy: of masked tokens",
            *_DEFINITIONS,
        ),
        num_keys=3,
    )


def write_entropy_figure(entropies: Sequence[NamedEntropy], folder: Path) -> list[Path]:
    """Write `entropy.png` and `entropy.svg`, a line for each model and k over p; a panel for each definition where an
    ExLM has both. Nothing is written where no entropy is defined.

    Raises:
        CheckpointError: The file system refuses.
    """
    entropies = [(name, entropy) for name, entropy in entropies if not math.isnan(entropy.entropy_bits)]
    if not entropies:
        return []
    make_folder(folder)
    has_both = any(entropy.entropy_posterior_bits is not None for _, entropy in entropies)
    panels = [False, True] if has_both else [False]
    lines: dict[str, list[PredictionEntropy]] = {}
    for name, entropy in entropies:
        lines.setdefault(f"{name}, k = {_num_copies(entropy)}", []).append(entropy)
    values = [_value(entropy, is_weighted) for _, entropy in entropies for is_weighted in panels]
    highest = max(value for value in values if not math.isnan(value))
    with drawing():
        figure = new_figure(
            _PANEL_INCHES[0] * len(panels),
            _PANEL_INCHES[1] + 0.2 * len(lines),
            "Entropy of predictions over the mask ratio",
            [_DEFINITIONS[is_weighted] for is_weighted in panels],
        )
        for axes, is_weighted in zip(
            figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True
        ):
            quieten(axes)
            axes.set_title(_WEIGHTED if is_weighted else _OVER_STATES, fontsize=9.5, color=INK, loc="left")
            axes.set_xlabel("mask ratio p (%)", color=FAINT_INK)
            for index, (label, entropies_of) in enumerate(lines.items()):
                points = sorted((100 * entropy.mask_ratio, _value(entropy, is_weighted)) for entropy in entropies_of)
                (line,) = axes.plot(*zip(*points, strict=True), color=RUN_COLOURS[index % len(RUN_COLOURS)])
                line.set(marker=_MARKERS[index % len(_MARKERS)], markersize=4.5, linewidth=1.6, label=label)
            axes.set(xlim=(0, 100), ylim=(0, 1.08 * highest))
        figure.axes[0].set_ylabel("bits", color=FAINT_INK)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        legend = figure.legend(handles, labels, loc="outside lower left", frameon=False, labelcolor=INK)
        for text in legend.get_texts():
            text.set_parse_math(False)
        return write_figure(figure, folder, "entropy")


def _num_copies(entropy: PredictionEntropy) -> int:
    return entropy.num_states_per_mask if entropy.objective == "exlm" else entropy.num_repeats


def _value(entropy: PredictionEntropy, is_weighted: bool) -> float:
    if not is_weighted or entropy.objective == "mlm":
        return entropy.entropy_bits
    weighted = entropy.entropy_posterior_bits
    # without transitions no path weighs the states
    return math.nan if weighted is None else weighted
