"""Figure 12: entropy of the predictions over the mask ratio p, one line for the MLM and one for each k of ExLM."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.analysis.grid_statistics import mean_and_deviation
from exlm_cli.report.palette import FAINT_INK, INK, RUN_COLOURS
from exlm_cli.report.sweep_rows import ENTROPIES, SweepRow
from exlm_cli.run_dir import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = ("png", "svg")
_DPI = 160.0
_PANEL_INCHES = (4.2, 3.0)
_MLM_COLOUR = INK
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINE_STYLES = ("-", "--", ":", "-.")
_TITLES = {"entropy_bits": "Mean over states", "entropy_posterior_bits": "States weighted by the posterior"}


def write_entropy_figure(rows: Sequence[SweepRow], folder: Path) -> list[Path]:
    """Write `figure-12.png` and `.svg` into a folder that exists; nothing where entropy was measured at one p alone.

    Raises:
        CheckpointError: The file system refuses.
    """
    files = render_entropy(rows, _FORMATS)
    for suffix, data in files.items():
        write_atomically(folder / f"figure-12.{suffix}", data)
    return [folder / f"figure-12.{suffix}" for suffix in files]


def entropy_lines(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the variants that Figure 12 compares, MLM first, then by k: those that differ in k and p alone."""
    measured = [row for row in rows if len(row.entropy_at) > 1 and _is_compared(row)]
    return sorted(measured, key=lambda row: (row.about["num_states_per_mask"], row.about["mask_ratio"]))


def render_entropy(rows: Sequence[SweepRow], formats: Sequence[str]) -> dict[str, bytes]:
    """Draw Figure 12, once for each definition of ExLM's entropy; the same rows give the same bytes.

    Args:
        rows: Variants of a sweep; bars are standard deviations over seeds.
        formats: File formats of matplotlib.

    Returns:
        Bytes by format; none where there is nothing to draw.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = entropy_lines(rows)
    if not lines:
        return {}
    kinds = [kind for kind in ENTROPIES if any(kind in at for row in lines for at in row.entropy_at.values())]
    width, height = 0.2 + _PANEL_INCHES[0] * len(kinds), _PANEL_INCHES[1] + 0.9
    settings: Any = {"font.family": "DejaVu Sans", "font.size": 9.0, "svg.hashsalt": "exlm", "svg.fonttype": "path"}
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle("Entropy of the predictions (Figure 12)", x=0.012, ha="left", fontsize=11, color=INK)
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for panel, kind in zip(panels, kinds, strict=True):
            _draw(panel, lines, kind)
        panels[0].set_ylabel("entropy (bits)", color=FAINT_INK)
        handles, words = panels[0].get_legend_handles_labels()
        figure.legend(handles, words, loc="outside lower left", ncols=4, fontsize=8, frameon=False, labelcolor=INK)
        files = {}
        for name in formats:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=name, dpi=_DPI, metadata={"Date" if name == "svg" else "Software": None})
            files[name] = buffer.getvalue()
        return files


def _draw(axes: "Axes", lines: Sequence[SweepRow], kind: str) -> None:
    ks = sorted({row.about["num_states_per_mask"] for row in lines if row.about["objective"] == "exlm"})
    trained_at = sorted({row.about["mask_ratio"] for row in lines})
    axes.set_title(_TITLES[kind], fontsize=9, color=INK, loc="left")
    axes.set_xlabel("mask ratio p of the input", color=FAINT_INK)
    axes.tick_params(colors=FAINT_INK, length=3)
    axes.grid(visible=True, color="#E6E9EC", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color("#B5BDC5")
    ratios = sorted({ratio for row in lines for ratio in row.entropy_at})
    axes.set_xticks(ratios, [f"{100 * ratio:g}%" for ratio in ratios])
    for row in lines:
        is_mlm = row.about["objective"] == "mlm"
        points = [
            (ratio, *mean_and_deviation(values))
            for ratio in sorted(row.entropy_at)
            if (values := row.entropies(ratio, kind))
        ]
        if not points:
            continue
        index = 0 if is_mlm else 1 + ks.index(row.about["num_states_per_mask"])
        axes.errorbar(
            [x for x, _, _ in points],
            [mean for _, mean, _ in points],
            yerr=[0.0 if deviation != deviation else deviation for _, _, deviation in points],
            label=_name(row, has_several_ratios=len(trained_at) > 1),
            color=_MLM_COLOUR if is_mlm else RUN_COLOURS[(index - 1) % len(RUN_COLOURS)],
            linestyle=_LINE_STYLES[trained_at.index(row.about["mask_ratio"]) % len(_LINE_STYLES)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            capsize=3,
            linewidth=1.4,
        )


def _is_compared(row: SweepRow) -> bool:
    about = row.about
    spoken = {"objective", "masking.num_states_per_mask", "masking.mask_ratio"}
    if about["objective"] == "mlm":
        spoken |= {"model.rope", "model.clone_embedding"}
    return set(row.changes) <= spoken


def _name(row: SweepRow, *, has_several_ratios: bool) -> str:
    name = "MLM" if row.about["objective"] == "mlm" else f"ExLM, k = {row.about['num_states_per_mask']}"
    return f"{name}, trained at p = {100 * row.about['mask_ratio']:g}%" if has_several_ratios else name
