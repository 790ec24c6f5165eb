"""Figure 12: entropy of the predictions over the mask ratio p, one line for the MLM and one for each k of ExLM."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.experiments.statistics import mean_and_deviation
from exlm_cli.report.style import FAINT_INK, INK, RUN_COLOURS, drawing, new_figure, quieten, write_figure
from exlm_cli.report.sweep_rows import ENTROPIES, SweepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_INCHES = (4.0, 3.4)
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINE_STYLES = ("-", "--", ":", "-.")
_TITLES = {"entropy_bits": "mean over states", "entropy_posterior_bits": "states weighted by the posterior"}


def write_entropy_figures(rows: Sequence[SweepRow], folder: Path) -> list[Path]:
    """Write `figure-12.png` and `.svg`, a panel for each definition of ExLM's entropy; equal rows give equal bytes.

    Variants that change more than k and p have a figure of their own where several share what they change:
    `figure-12-<the shortest of their labels>`.

    Args:
        rows: Variants of a sweep; bars are standard deviations over seeds.
        folder: Where; it exists.

    Returns:
        The files; none where no line has two points.

    Raises:
        CheckpointError: The file system refuses.
    """
    return [
        path
        for name, lines in entropy_lines(rows).items()
        for path in _write_figure(lines, folder, "figure-12" if name is None else f"figure-12-{name}", name)
    ]


def entropy_lines(rows: Sequence[SweepRow]) -> dict[str | None, list[SweepRow]]:
    """Return the variants that a figure compares, MLM first, then by k: those that differ in k and p alone.

    `None` has those that change nothing else. Others stand under the shortest label of those that share their changes.
    """
    measured = [row for row in rows if len(row.entropy_at) > 1]
    families: dict[str, list[SweepRow]] = {}
    for row in measured:
        families.setdefault(repr(sorted(_other_changes(row).items())), []).append(row)
    plain = families.pop("[]", [])
    mlms = [row for row in plain if row.about["objective"] == "mlm"]
    named: dict[str | None, list[SweepRow]] = {None: plain} if plain else {}
    for family in families.values():
        if len({row.about["num_states_per_mask"] for row in family}) > 1:
            named[min((row.label for row in family), key=len)] = mlms + family
    return {
        name: sorted(lines, key=lambda row: (row.about["num_states_per_mask"], row.about["mask_ratio"]))
        for name, lines in named.items()
    }


def _other_changes(row: SweepRow) -> dict[str, Any]:
    """What a variant changes beside k and p; an MLM has no second axis and no clones."""
    spoken = {"objective", "masking.num_states_per_mask", "masking.mask_ratio"}
    if row.about["objective"] == "mlm":
        spoken |= {"model.rope", "model.clone_embedding"}
    return {key: value for key, value in row.changes.items() if key not in spoken}


def _write_figure(lines: Sequence[SweepRow], folder: Path, stem: str, variant: str | None) -> list[Path]:
    kinds = [kind for kind in ENTROPIES if any(kind in at for row in lines for at in row.entropy_at.values())]
    most = max(len(row.seeds) for row in lines)
    spread = f"mean and standard deviation of {most} seeds" if most > 1 else "one seed"
    whose = "" if variant is None else f"; ExLM is {variant} at each k"
    with drawing():
        figure = new_figure(
            _PANEL_INCHES[0] * len(kinds),
            _PANEL_INCHES[1],
            "Entropy of the predictions (Figure 12)",
            [f"each model on validation data masked at p{whose}; {spread}"],
        )
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for panel, kind in zip(panels, kinds, strict=True):
            _draw(panel, lines, kind)
        panels[0].set_ylabel("entropy (bits)", color=FAINT_INK)
        handles, words = panels[0].get_legend_handles_labels()
        columns = 2 * len(kinds) if len(_trained_at(lines)) == 1 else len(kinds)
        figure.legend(
            handles, words, loc="outside lower left", ncols=columns, fontsize=8, frameon=False, labelcolor=INK
        )
        return write_figure(figure, folder, stem)


def _draw(axes: "Axes", lines: Sequence[SweepRow], kind: str) -> None:
    ks = sorted({row.about["num_states_per_mask"] for row in lines if row.about["objective"] == "exlm"})
    trained_at = _trained_at(lines)
    quieten(axes)
    axes.set_title(_TITLES[kind], fontsize=9, color=INK, loc="left")
    axes.set_xlabel("mask ratio p of the input", color=FAINT_INK)
    ratios = sorted({ratio for row in lines for ratio in row.entropy_at})
    axes.set_xticks(ratios, [f"{100 * ratio:g}%" for ratio in ratios])
    for row in lines:
        points = [
            (ratio, *mean_and_deviation(values))
            for ratio in sorted(row.entropy_at)
            if (values := row.entropies(ratio, kind))
        ]
        if not points:
            continue
        is_mlm = row.about["objective"] == "mlm"
        index = 0 if is_mlm else 1 + ks.index(row.about["num_states_per_mask"])
        axes.errorbar(
            [ratio for ratio, _, _ in points],
            [mean for _, mean, _ in points],
            yerr=[0.0 if math.isnan(deviation) else deviation for _, _, deviation in points],
            label=_name(row, has_several_ratios=len(trained_at) > 1),
            color=INK if is_mlm else RUN_COLOURS[(index - 1) % len(RUN_COLOURS)],
            linestyle=_LINE_STYLES[trained_at.index(row.about["mask_ratio"]) % len(_LINE_STYLES)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            capsize=3 if len(row.seeds) > 1 else 0,
            linewidth=1.4,
        )


def _trained_at(lines: Sequence[SweepRow]) -> list[float]:
    return sorted({row.about["mask_ratio"] for row in lines})


def _name(row: SweepRow, *, has_several_ratios: bool) -> str:
    name = "MLM" if row.about["objective"] == "mlm" else f"ExLM, k = {row.about['num_states_per_mask']}"
    return f"{name}, trained at p = {100 * row.about['mask_ratio']:g}%" if has_several_ratios else name
