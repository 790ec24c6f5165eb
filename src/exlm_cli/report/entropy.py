"""Entropy of predictions over the mask ratio p: Figure 12 with a line for each model, and a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.experiments.results import PredictionEntropy
from exlm_cli.experiments.statistics import mean_and_deviation
from exlm_cli.format import NO_VALUE, format_measure, format_ratio
from exlm_cli.report import style
from exlm_cli.report.tables import ReportTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENTROPIES = {"entropy_bits": "mean over states", "entropy_posterior_bits": "weighted by the posterior"}
"""Two entropies of ExLM: mean over a mask's states, or weighted by the posterior that a state emits a target."""

DEFINITIONS = (
    "mean over states: for (Repeated) MLM over tokens whose copies are all masked (App. E); for ExLM over all states "
    "of all masks",
    "weighted by the posterior: for ExLM each state by the probability that it emits a target, given the targets; an "
    "MLM has one state per mask, so both are equal",
)
"""The entropies in words, in the order of `ENTROPIES`."""

_PANEL_INCHES = (4.0, 3.4)


@dataclass(frozen=True)
class EntropyLine:
    """Entropies of one model.

    Attributes:
        label: In the legend.
        is_mlm: A mask of an MLM has one state, so both entropies are `entropy_bits`.
        entropies: By mask ratio and name in `ENTROPIES`: one value for each seed that has it.
        colour: Number of its colour and marker; 0 is black.
        style: Number of its line style.
    """

    label: str
    is_mlm: bool
    entropies: dict[float, dict[str, list[float]]]
    colour: int = 0
    style: int = 0

    def values(self, ratio: float, name: str) -> Sequence[float]:
        """Return an entropy at a mask ratio, one value for each seed that has it."""
        return self.entropies.get(ratio, {}).get("entropy_bits" if self.is_mlm else name, ())

    def points(self, name: str) -> list[tuple[float, float, float]]:
        """Return mask ratio, mean and deviation (0 for one seed) wherever an entropy is defined."""
        found = []
        for ratio in sorted(self.entropies):
            if values := self.values(ratio, name):
                mean, deviation = mean_and_deviation(values)
                found.append((ratio, mean, 0.0 if math.isnan(deviation) else deviation))
        return found


def write_entropy_figure(
    lines: Sequence[EntropyLine], folder: Path, stem: str, *, title: str, captions: Sequence[str]
) -> list[Path]:
    """Write `<stem>.png` and `.svg`, a panel for each entropy that an ExLM has; equal lines give equal bytes.

    Args:
        lines: Models; bars are standard deviations over seeds.
        folder: Existing folder.
        stem: Of the files.
        title, captions: Above the panels.

    Returns:
        The files; none where no entropy is defined.

    Raises:
        CheckpointError: The file system refuses.
    """
    names = [
        name
        for name in ENTROPIES
        if any(line.points(name) for line in lines if name == "entropy_bits" or not line.is_mlm)
    ]
    if not names:
        return []
    with style.drawing():
        figure = style.new_figure(_PANEL_INCHES[0] * len(names), _PANEL_INCHES[1] + 0.1 * len(lines), title, captions)
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for panel, name in zip(panels, names, strict=True):
            _draw(panel, lines, name)
        panels[0].set_ylabel("entropy (bits)", color=style.FAINT_INK)
        handles, labels = panels[0].get_legend_handles_labels()
        style.add_legend(figure, handles, labels, loc="outside lower left", ncols=len(names), fontsize=8)
        return style.write_figure(figure, folder, stem)


def _draw(axes: "Axes", lines: Sequence[EntropyLine], name: str) -> None:
    style.set_up_axes(axes, "mask ratio p of the input", title=ENTROPIES[name], title_size=9)
    ratios = sorted({ratio for line in lines for ratio in line.entropies})
    axes.set_xticks(ratios, list(map(format_ratio, ratios)))
    for line in lines:
        if points := line.points(name):
            xs, means, deviations = zip(*points, strict=True)
            axes.errorbar(
                xs,
                means,
                yerr=deviations,
                label=line.label,
                color=style.RUN_COLOURS[(line.colour - 1) % len(style.RUN_COLOURS)] if line.colour else style.INK,
                linestyle=style.LINE_STYLES[line.style % len(style.LINE_STYLES)],
                marker=style.MARKERS[line.colour % len(style.MARKERS)],
                markersize=5,
                capsize=3 if any(deviations) else 0,
                linewidth=1.4,
            )


def entropy_table(entropies: Sequence[tuple[str, PredictionEntropy]]) -> ReportTable:
    """Return a row for each named model and masking."""
    rows = [
        (
            name,
            str(_num_copies(entropy)),
            format_ratio(entropy.mask_ratio),
            format_measure(entropy.entropy_bits),
            NO_VALUE if entropy.entropy_posterior_bits is None else format_measure(entropy.entropy_posterior_bits),
            *(format_measure(entropy.metrics[name]) for name in ("loss", "mask_accuracy")),
        )
        for name, entropy in entropies
    ]
    legend = "k: states per mask (ExLM) or copies of a token (Repeated MLM); p: mask ratio; accuracy: of masked tokens"
    return ReportTable(
        "entropy",
        "Entropy of predictions, in bits",
        ("model", "k", "p", *ENTROPIES.values(), "loss", "accuracy"),
        (tuple(rows),),
        (legend, *DEFINITIONS),
        num_keys=3,
    )


def entropy_lines(entropies: Sequence[tuple[str, PredictionEntropy]]) -> list[EntropyLine]:
    """Return a line for each named model and k, with the entropies that are defined."""
    lines: dict[str, EntropyLine] = {}
    for name, entropy in entropies:
        label = f"{name}, k = {_num_copies(entropy)}"
        line = lines.setdefault(label, EntropyLine(label, entropy.objective == "mlm", {}, colour=1 + len(lines)))
        values = {name: getattr(entropy, name) for name in ENTROPIES}
        line.entropies[entropy.mask_ratio] = {name: [value] for name, value in values.items() if value is not None}
    return list(lines.values())


def _num_copies(entropy: PredictionEntropy) -> int:
    return entropy.num_states_per_mask if entropy.objective == "exlm" else entropy.num_repeats
