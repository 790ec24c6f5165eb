"""Lines over steps and over mask ratios: training curves of runs (Figure 9), and entropy of predictions (Figure 12)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.config.sections import one_ratio
from exlm_cli.errors import DataError
from exlm_cli.experiments.results import PredictionEntropy
from exlm_cli.finetune.scores import Spread, spread_of
from exlm_cli.format import NO_VALUE, NOT_DEFINED, format_count, format_masks, format_measure, format_ratio
from exlm_cli.report import style
from exlm_cli.report.tables import Entry, Number, ReportTable
from exlm_cli.run_dir import MetricsRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LineStyle = tuple[str, Any]
"""Colour and line style."""
_Line = tuple[str, str, list[int], list[float]]
"""Run, key, steps and values."""
_MAX_SMOOTHED = 12
"""At most this many rows on either side enter a running mean; the raw rows are drawn faintly behind it."""
_MIN_LOG_RATIO = 4.0
"""A logarithmic axis is for values that differ by more than this."""
_MAX_COLUMNS = 4
_PANEL_INCHES = (3.5, 2.5)
_MARKERS = dict(zip(style.LINE_STYLES, style.MARKERS, strict=False))
"""Marker of each line style: a single point does not show the style."""


@dataclass(frozen=True)
class _Panel:
    """One pair of axes.

    Attributes:
        kind: Kind of the rows that it shows: `train`, `valid` or `valid_at`.
        keys: Values of a row that it shows, with their names in the legend of the panel.
        is_log: Use a logarithmic axis where the values differ much.
        is_smoothed: Draw a running mean over the values.
        floor: Smallest possible value, where it has a meaning: the axis begins there.
        min_top: The axis reaches this value, so that a line on the floor looks like one.
        has_reference: Draw what token frequencies reach on the same masks.
        at: Number of masks or mask ratio of rows of the kind `valid_at`; other rows have none.
    """

    title: str
    kind: str
    keys: Mapping[str, str]
    is_log: bool = False
    is_smoothed: bool = False
    floor: float | None = None
    min_top: float = 0.0
    has_reference: bool = False
    at: float | None = None


_PANELS = (
    _Panel("Training loss (nats per target)", "train", {"loss": ""}, is_smoothed=True),
    _Panel(
        "Validation loss (nats per target)",
        "valid",
        {"loss": "canonical SMILES", "loss_spellings": "another spelling"},
        has_reference=True,
    ),
    _Panel("Perplexity", "valid", {"perplexity": ""}, is_log=True),
    _Panel("Mask accuracy", "valid", {"mask_accuracy": ""}),
    _Panel(
        "Entropy of predictions (bits)",
        "valid",
        {"entropy_bits": "mean over states", "entropy_posterior_bits": "posterior-weighted"},
    ),
    _Panel(
        "States in use",
        "valid",
        {"effective_states": "per mask", "clones_in_use": "over all masks"},
        floor=1.0,
        min_top=2.0,
    ),
    _Panel("Path entropy (bits per target)", "valid", {"path_entropy_bits": ""}, floor=0.0, min_top=0.5),
    _Panel(
        "Share of masks on the best path",
        "valid",
        {"masks_with_0_share": "yield no token", "masks_with_2plus_share": "yield 2 or more"},
        floor=0.0,
        min_top=0.1,
    ),
)


def plot_curves(
    rows_by_run: Mapping[str, Sequence[MetricsRow]],
    path: Path,
    styles: Mapping[str, LineStyle] | None = None,
    captions: Sequence[str] = (),
    unigram_losses: Mapping[str, float] | None = None,
) -> list[Path]:
    """Write the curves as PNG and SVG; the same rows give the same bytes.

    Args:
        rows_by_run: Rows of `metrics.jsonl` by the name of the run in the legend.
        path: The two files without their suffixes; a `.png` or `.svg` at its end is replaced. Its folder exists.
        styles: Colour and line style of each run; None: one after the other from the palette.
        captions: Above the panels.
        unigram_losses: What token frequencies reach on the masks of validation, by the name of the run.

    Returns:
        The two files.

    Raises:
        DataError: No row holds anything to draw.
        CheckpointError: A file cannot be written.
    """
    panels = [panel for panel in (*_PANELS, *_panels_at(rows_by_run)) if _lines_of(panel, rows_by_run)]
    if not panels:
        raise DataError(
            f"nothing to draw: none of {len(rows_by_run)} runs has rows of training or validation",
            "let them run for `train.log_every_steps` steps",
        )
    if styles is None:
        # after the last colour they begin again with another line style
        looks = itertools.cycle((colour, line) for line in style.LINE_STYLES for colour in style.RUN_COLOURS)
        styles = dict(zip(rows_by_run, looks, strict=False))
    num_rows = math.ceil(len(panels) / _MAX_COLUMNS)
    num_columns = math.ceil(len(panels) / num_rows)
    legend_inches = 0.2 + 0.24 * math.ceil(len(rows_by_run) / num_columns)
    last_step = max(row["step"] for rows in rows_by_run.values() for row in rows)
    with style.drawing():
        size = _PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows + legend_inches
        figure = style.new_figure(*size, captions=captions)
        for index, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(num_rows, num_columns, index)
            axes.set_xlim(0, 1.02 * max(last_step, 1))  # a run may have one row, at step 0
            _draw_panel(axes, panel, _lines_of(panel, rows_by_run), styles)
            if panel.has_reference:
                _draw_references(axes, sorted(set((unigram_losses or {}).values())))
        _add_legend(figure, {name: styles[name] for name in rows_by_run}, loc="outside lower left", ncols=num_columns)
        stem = path.stem if path.suffix.lower() in (".png", ".svg") else path.name
        return style.write_figure(figure, path.parent, stem)


def _panels_at(rows_by_run: Mapping[str, Sequence[MetricsRow]]) -> list[_Panel]:
    """Return a panel for each number of masks and mask ratio of `train.validate_at`; ratios are the later ones."""
    found = {at for rows in rows_by_run.values() for row in rows if (at := row.get("at")) is not None}
    return [
        _Panel(f"Loss given the number, {format_masks(at)}", "valid_at", {"loss_given_length": ""}, at=at)
        for at in sorted(found, key=lambda at: (at < 1, at))
    ]


def _lines_of(panel: _Panel, rows_by_run: Mapping[str, Sequence[MetricsRow]]) -> list[_Line]:
    """Return the finite values of a panel; runs and keys that have none are left out."""
    lines = []
    for name, rows in rows_by_run.items():
        for key in panel.keys:
            of_kind = [
                (row["step"], row.get(key))
                for row in rows
                if (row.get("kind"), row.get("at")) == (panel.kind, panel.at)
            ]
            known = [
                (step, value) for step, value in of_kind if isinstance(value, int | float) and math.isfinite(value)
            ]
            if known:
                steps, values = zip(*known, strict=True)
                lines.append((name, key, list(steps), list(values)))
    return lines


def _draw_panel(axes: "Axes", panel: _Panel, lines: list[_Line], styles: Mapping[str, LineStyle]) -> None:
    from matplotlib.ticker import LogLocator

    style.set_up_axes(axes, "step", title=panel.title)
    drawn = [value for *_, values in lines for value in values]
    if panel.is_log and max(drawn) / min(drawn) >= _MIN_LOG_RATIO:
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
    # an MLM has no posterior-weighted entropy, so its panel has one line and needs no legend
    keys = [key for key in panel.keys if any(key == of_line for _, of_line, _, _ in lines)]
    line_of_key = dict(zip(keys, style.LINE_STYLES, strict=False))
    for name, key, steps, values in lines:
        colour, line_of_run = styles[name]
        if panel.is_smoothed:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
            values = _mean_around(values, min(_MAX_SMOOTHED, len(values) // 20))
        look = line_of_key[key] if len(keys) > 1 else line_of_run
        marker = _MARKERS[look] if len(steps) <= 40 and not panel.is_smoothed else ""
        size = 2.8 if len(steps) > 1 else 5
        axes.plot(steps, values, look, color=colour, linewidth=1.5, zorder=3, marker=marker, markersize=size)
    if panel.floor is not None:
        top = max(panel.min_top, axes.get_ylim()[1])
        # a little below the floor, so that a line on it is not cut
        axes.set_ylim(panel.floor - 0.03 * (top - panel.floor), top)
    if len(keys) > 1:
        _add_legend(axes, {panel.keys[key]: (style.FAINT_INK, line_of_key[key]) for key in keys}, fontsize=7.5)


def _draw_references(axes: "Axes", losses: Sequence[float]) -> None:
    """Draw the losses of token frequencies; runs on the same data have the same one."""
    for index, loss in enumerate(losses):
        axes.axhline(loss, color=style.FAINT_INK, linestyle=(0, (1, 2)), linewidth=1.0)
        if index == 0:
            place = axes.get_yaxis_transform()
            axes.text(
                0.98,
                loss,
                "token frequencies",
                transform=place,
                ha="right",
                va="bottom",
                fontsize=7,
                color=style.FAINT_INK,
            )


def _mean_around(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and `reach` values on either side, fewer on both sides near the ends."""
    means = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        means.append(math.fsum(values[index - near : index + near + 1]) / (2 * near + 1))
    return means


def _add_legend(owner: Any, looks: Mapping[str, LineStyle], **options: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linewidth=1.8, color=colour, linestyle=line, marker=_MARKERS[line], markersize=4)
        for colour, line in looks.values()
    ]
    # long enough for dashes on both sides of the marker
    style.add_legend(owner, handles, list(looks), handlelength=3, **options)


ENTROPIES = {"entropy_bits": "mean over states", "entropy_posterior_bits": "weighted by the posterior"}
"""Two entropies of ExLM: mean over the states, or weighted by the posterior that a state emits a target."""

DEFINITIONS = (
    "mean over states: for (Repeated) MLM over tokens whose copies are all masked (App. E); for ExLM over all states "
    "of all masks",
    "weighted by the posterior: for ExLM each state by the probability that it emits a target, given the targets; an "
    "MLM has one state per mask, so both are equal",
)
"""The entropies in words, in the order of `ENTROPIES`."""

_ENTROPY_INCHES = (4.0, 3.4)


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
    entropies: Mapping[float, Mapping[str, Sequence[float]]]
    colour: int = 0
    style: int = 0

    def spread(self, ratio: float, name: str) -> Spread:
        """Return an entropy at a mask ratio over the seeds that have it."""
        return spread_of(self.entropies.get(ratio, {}).get("entropy_bits" if self.is_mlm else name, ()))

    def points(self, name: str) -> list[tuple[float, float, float]]:
        """Return mask ratio, mean and deviation (0 for one seed) wherever an entropy is defined."""
        found = []
        for ratio in sorted(self.entropies):
            if (spread := self.spread(ratio, name)).num:
                found.append((ratio, spread.mean, 0.0 if math.isnan(spread.std) else spread.std))
        return found


def write_entropy_figure(
    lines: Sequence[EntropyLine], folder: Path, stem: str, *, title: str, captions: Sequence[str]
) -> list[Path]:
    """Write `<stem>.png` and `.svg`, a panel for each entropy that an ExLM has; equal lines give equal bytes.

    Args:
        lines: Models; bars are standard deviations over seeds.
        folder: Existing folder.
        title, captions: Above the panels.

    Returns:
        The files; none where no entropy is defined.

    Raises:
        CheckpointError: A file cannot be written.
    """
    names = [
        name
        for name in ENTROPIES
        if any(line.points(name) for line in lines if name == "entropy_bits" or not line.is_mlm)
    ]
    if not names:
        return []
    with style.drawing():
        figure = style.new_figure(
            _ENTROPY_INCHES[0] * len(names), _ENTROPY_INCHES[1] + 0.1 * len(lines), title, captions
        )
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for panel, name in zip(panels, names, strict=True):
            _draw_entropies(panel, lines, name)
        panels[0].set_ylabel("entropy (bits)", color=style.FAINT_INK)
        handles, labels = panels[0].get_legend_handles_labels()
        style.add_legend(figure, handles, labels, loc="outside lower left", ncols=len(names), fontsize=8)
        return style.write_figure(figure, folder, stem)


def _draw_entropies(axes: "Axes", lines: Sequence[EntropyLine], name: str) -> None:
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
                label=style.legend_label(line.label),
                color=style.RUN_COLOURS[(line.colour - 1) % len(style.RUN_COLOURS)] if line.colour else style.INK,
                linestyle=style.LINE_STYLES[line.style % len(style.LINE_STYLES)],
                marker=style.MARKERS[line.colour % len(style.MARKERS)],
                markersize=5,
                capsize=3 if any(deviations) else 0,
                linewidth=1.4,
            )


def entropy_table(entropies: Sequence[tuple[str, PredictionEntropy]]) -> ReportTable:
    """Return a row for each named model and masking."""

    def entry(value: float | None, missing: str = NOT_DEFINED) -> Entry:
        return Number(math.nan if value is None else value, format_measure, missing=missing)

    rows = [
        (
            name,
            Number(_num_copies(entropy), format_count),
            Number(one_ratio(entropy.mask_ratio), format_ratio),
            entry(entropy.metrics["entropy_bits"]),
            entry(entropy.metrics.get("entropy_posterior_bits"), NO_VALUE),
            *(entry(entropy.metrics[metric]) for metric in ("loss", "mask_accuracy")),
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
    by_label: dict[str, list[PredictionEntropy]] = {}
    for name, entropy in entropies:
        by_label.setdefault(f"{name}, k = {_num_copies(entropy)}", []).append(entropy)
    lines = []
    for colour, (label, found) in enumerate(by_label.items(), start=1):
        known = {
            one_ratio(entropy.mask_ratio): {
                name: [v] for name in ENTROPIES if (v := entropy.metrics.get(name)) is not None
            }
            for entropy in found
        }
        lines.append(EntropyLine(label, found[0].objective == "mlm", known, colour))
    return lines


def _num_copies(entropy: PredictionEntropy) -> int:
    return entropy.num_states_per_mask if entropy.objective == "exlm" else entropy.num_repeats
