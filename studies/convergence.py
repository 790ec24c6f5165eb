"""Study at convergence: MLM, MLMs of equal cost and ExLM at three mask ratios, on real text and SMILES.

Pinned to commit 3d172fa5 (`README.md`); its rows were made at 6c5b79f to c9e1ec1, and each names its own.

Trains the cells of two recipes of `exlm sweep`, `recipes/convergence-text.yaml` and `convergence-smiles.yaml`, one by
one, on one thread. Each cell is a row of `results/convergence.csv`; a row that exists with the planned steps is not
trained again. A cell that was stopped goes on from its last checkpoint under `runs/study_convergence/`. `last_tenth` is
what validation gained in the last tenth of the steps, nats per target. `--times N` multiplies the steps of every cell.

    python studies/convergence.py DATA --sets text --variants mlm-p15 exlm-k4-p15 --seeds 1
    python studies/convergence.py DATA --sets text --variants mlm-p62.2 exlm-k4-last-p62.2 --times 4
    python studies/convergence.py --table
    python studies/convergence.py --figure docs/images/convergence.png

DATA is a folder with `text/wikipedia_en_{train,valid}.txt.xz` and `smiles/{train,valid}.txt.xz`. `--table` prints the
tables of docs/lab_notes/convergence.md: means over seeds, and differences between models of the same seed and mask
ratio with their 95 % interval. MLM+ costs as many FLOPs as ExLM with k = 4 whose masks are expanded last, MLM++ as
ExLM with k = 4 expanded at the input. With `--times N` they are the tables of the longer cells.
`--figure` draws these differences for last ExLM, k = 4.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from exlm_cli.config.describe import recipe_step_flops
from exlm_cli.config.load import load_recipe
from exlm_cli.config.sweep import SweepCell, SweepRecipe
from exlm_cli.errors import ExlmError
from exlm_cli.experiments.cell import run_cell
from exlm_cli.experiments.results import EntropyAt
from exlm_cli.files import write_atomically
from exlm_cli.progress import SilentProgress
from exlm_cli.report.style import (
    RUN_COLOURS,
    SPINE_INK,
    add_legend,
    drawing,
    new_figure,
    render_figure,
    set_up_axes,
)
from exlm_cli.report.tables import ReportTable, as_markdown
from rows import append_row, mean_and_half, mean_column, read_rows, show_interval, surroundings

NAME = "convergence"
RECIPES = Path(__file__).parent / "recipes"
WORK = Path("runs/study_convergence")
LOSS = "loss_given_length"
FILES = {"text": "text/wikipedia_en_{}.txt.xz", "smiles": "smiles/{}.txt.xz"}
TITLES = {"text": "bytes", "smiles": "SMILES"}
RATIOS = ("15", "38.7", "62.2")
MODELS = {
    "mlm": "MLM",
    "mlm-plus": "MLM+",
    "mlm-plus-plus": "MLM++",
    "exlm-k4": "ExLM, k = 4",
    "exlm-k2-last": "last ExLM, k = 2",
    "exlm-k4-last": "last ExLM, k = 4",
    "exlm-k8-last": "last ExLM, k = 8",
}
"""Rows of the table, in their order: the variant's name without its mask ratio, and the title."""
MORE_STATES = (
    ("k = 2 less MLM", "exlm-k2-last", "mlm"),
    ("k = 4 less k = 2", "exlm-k4-last", "exlm-k2-last"),
    ("k = 8 less k = 4", "exlm-k8-last", "exlm-k4-last"),
)
MEANS = {
    "effective_states": ("states in use", ".2f"),
    "clones_in_use": ("over all masks", ".2f"),
    "entropy_bits": ("bits", ".3f"),
    "mask_accuracy": ("accuracy", ".1%"),
    "last_tenth": ("last tenth", ".4f"),
}
"""Columns of the table that are means of columns of the rows, each with its heading and format."""
FIGURES = ("loss", LOSS, "mask_accuracy", "entropy_bits", "effective_states", "clones_in_use", "masks_with_0_share")


def plan(data: Path, name: str, times: int) -> SweepRecipe:
    """Return the sweep of a data set, with the steps of each variant multiplied."""
    files = {part: data / FILES[name].format(part) for part in ("train", "valid")}
    given = [f'pretrain.data.{part}=["{path}"]' for part, path in files.items()]
    overrides = [*given, "pretrain.train.num_threads=1", "pretrain.train.compile=true"]
    recipe = load_recipe(RECIPES / f"convergence-{name}.yaml", overrides, kind=SweepRecipe)
    if times == 1:
        return recipe
    steps, usual = "train.max_steps", recipe.pretrain.train.max_steps
    variants = {
        label: {**changes, steps: times * changes.get(steps, usual)} for label, changes in recipe.variants.items()
    }
    return recipe.changed({"variants": variants})


def last_tenth(metrics: Path, steps: int) -> float:
    """Return the validation loss at nine tenths of the steps, interpolated between rows, less that at the end."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    curve = {row["step"]: row[LOSS] for row in rows if row["kind"] == "valid"}
    before = np.interp(0.9 * steps, sorted(curve), [curve[step] for step in sorted(curve)])
    return float(before - curve[steps])


def entropy_columns(entropies: Sequence[EntropyAt]) -> dict[str, str]:
    """Return the bits at each mask ratio, in one order for all cells: a cell's own ratio comes first in its result."""
    by_ratio = sorted(entropies, key=lambda entropy: entropy.mask_ratio)
    return {f"bits_at_{entropy.mask_ratio:.3f}": f"{entropy.entropy_bits:.4f}" for entropy in by_ratio}


def train(name: str, cell: SweepCell, times: int) -> dict[str, object]:
    """Train and measure a cell, or finish it, and return its row."""
    folder = WORK / (name if times == 1 else f"{name}-times-{times}") / cell.folder
    result = run_cell(cell, folder, SilentProgress())
    figures = {column: f"{result.metrics[column]:.5f}" if column in result.metrics else "" for column in FIGURES}
    gain = last_tenth(folder / "pretrain" / "metrics.jsonl", result.steps)
    cost = {"steps": result.steps, "elapsed_s": round(result.elapsed_s), "last_tenth": f"{gain:.5f}"}
    cell_of = {"data": name, "variant": cell.label, "seed": cell.seed}
    entropies = entropy_columns(result.entropy)
    return cell_of | figures | entropies | cost | surroundings(torch.device("cpu"))


def is_planned(row: dict[str, str], cells: Mapping[str, SweepCell]) -> bool:
    """Return whether a row is of the sweep as it is: it has the planned steps, which follow the count of FLOPs."""
    return row["variant"] in cells and int(row["steps"]) == cells[row["variant"]].pretrain.train.max_steps


def plan_variants(name: str, times: int) -> dict[str, SweepCell]:
    """Return a cell of each variant of a data set, by its label."""
    return {cell.label: cell for cell in plan(Path("DATA"), name, times).plan_seed(1)}


def planned_rows(
    rows: list[dict[str, str]], name: str, planned: Mapping[str, SweepCell]
) -> dict[tuple[str, str], dict[str, str]]:
    """Return the rows of a data set that are of the sweep as it is, by variant and seed."""
    return {(row["variant"], row["seed"]): row for row in rows if row["data"] == name and is_planned(row, planned)}


def total_flops(cell: SweepCell) -> float:
    """Return the FLOPs of a cell's training."""
    return (cell.pretrain.train.max_steps or 0) * recipe_step_flops(cell.pretrain).total


def differences(cells: Mapping[tuple[str, str], dict[str, str]], variant: str, twin: str) -> list[float]:
    """Return the loss given T of a variant less that of a twin, for each seed that both have."""
    seeds = [seed for of, seed in cells if of == variant and (twin, seed) in cells]
    return [float(cells[variant, seed][LOSS]) - float(cells[twin, seed][LOSS]) for seed in seeds]


def show_gap(cells: Mapping[tuple[str, str], dict[str, str]], model: str, twin: str, ratio: str) -> str:
    """Return the mean of the differences and its interval; nothing where there is no twin."""
    return show_interval(differences(cells, f"{model}-p{ratio}", f"{twin}-p{ratio}")).replace("-", "−")


def tables(rows: list[dict[str, str]], times: int) -> list[str]:
    """Return Markdown tables: all models, and what more states gain."""
    models, gains = [], []
    for name in FILES:
        planned = plan_variants(name, times)
        cells = planned_rows(rows, name, planned)
        for ratio in RATIOS:
            of_ratio = (TITLES[name], f"{ratio} %")
            for model, title in MODELS.items():
                group = [row for (variant, _), row in cells.items() if variant == f"{model}-p{ratio}"]
                if not group:
                    continue
                gaps = [show_gap(cells, model, twin, ratio) if twin != model else "" for twin in ("mlm", "mlm-plus")]
                cost = total_flops(planned[f"{model}-p{ratio}"]) / total_flops(planned[f"mlm-p{ratio}"])
                run = (f"{int(group[0]['steps']):,}", f"{cost:.2f}", str(len(group)), mean_column(group, LOSS, ".3f"))
                means = [mean_column(group, column, form) for column, (_, form) in MEANS.items()]
                models.append((*of_ratio, title, *run, *gaps, *means))
            gains.append((*of_ratio, *(show_gap(cells, more, fewer, ratio) for _, more, fewer in MORE_STATES)))
    run_columns = ("steps", "cost", "seeds", "loss given T", "less MLM", "less MLM+")
    all_columns = ("data", "p", "model", *run_columns, *(heading for heading, _ in MEANS.values()))
    gain_columns = ("data", "p", *(heading for heading, *_ in MORE_STATES))
    found = (
        ReportTable("models", "ExLM and its MLMs", all_columns, (tuple(models),), num_keys=3),
        ReportTable("gains", "Loss given T, last ExLM", gain_columns, (tuple(gains),), num_keys=2),
    )
    return list(map(as_markdown, found))


def draw(path: Path, rows: list[dict[str, str]]) -> None:
    """Write the figure: last ExLM less its MLMs by mask ratio, a panel for each data set."""
    twins = {"MLM of equal steps": "mlm-", "MLM of equal cost": "mlm-plus-"}
    caption = "Nats a target, given T; below 0 ExLM is ahead. Dots are seeds, bars 95 % intervals of three or more."
    with drawing():
        figure = new_figure(7.4, 3.0, "ExLM expanded after all blocks, k = 4, less its MLMs", [caption])
        panels = figure.subplots(1, len(FILES), sharey=True)
        for axes, name in zip(panels, FILES, strict=True):
            cells = planned_rows(rows, name, plan_variants(name, times=1))
            set_up_axes(axes, "mask ratio", "" if axes is not panels[0] else "difference in loss", TITLES[name])
            axes.axhline(0, color=SPINE_INK, linewidth=1.2)
            axes.set_xticks(range(len(RATIOS)), [f"{ratio} %" for ratio in RATIOS])
            handles = []
            for number, (twin, colour) in enumerate(zip(twins.values(), RUN_COLOURS, strict=False)):
                for index, ratio in enumerate(RATIOS):
                    place = index + 0.16 * number - 0.08
                    gaps = differences(cells, f"exlm-k4-last-p{ratio}", f"{twin}p{ratio}")
                    dots = axes.plot([place] * len(gaps), gaps, "o", color=colour, markersize=3, alpha=0.6)
                    if len(gaps) >= 3:
                        mean, half = mean_and_half(gaps)
                        axes.errorbar(place, mean, half, color=colour, capsize=3, linewidth=1.4)
                handles += dots
        add_legend(panels[0], handles, list(twins), loc="lower left")
        write_atomically(path, render_figure(figure, ["png"])["png"])


def main() -> None:
    """Run the study, or print what exists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--sets", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="of the sweep, all if none is given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--times", type=int, default=1, metavar="N", help="multiply the steps of every cell")
    parser.add_argument("--table", action="store_true", help="print the rows that exist as tables")
    parser.add_argument("--figure", type=Path, help="PNG to write of the rows that exist")
    given = parser.parse_args()
    if given.table:
        sys.stdout.write("\n".join(tables(read_rows(NAME), given.times)))
        return
    if given.figure is not None:
        draw(given.figure, read_rows(NAME))
        return
    if given.data is None:
        parser.error("DATA is missing")
    torch.set_num_threads(1)
    for seed in given.seeds:
        plans = {name: plan(given.data.resolve(), name, given.times).plan_seed(seed) for name in given.sets}
        cells = {(name, cell.label): cell for name in given.sets for cell in plans[name]}
        for variant in given.variants or [cell.label for cell in plans[given.sets[0]]]:
            for name in given.sets:
                cell = cells[name, variant]
                rows = [row for row in read_rows(NAME) if (row["data"], row["seed"]) == (name, str(seed))]
                if not any(row["variant"] == variant and is_planned(row, {variant: cell}) for row in rows):
                    row = train(name, cell, given.times)
                    append_row(NAME, row)
                    sys.stderr.write(f"{name}, {variant}, seed {seed}: {row[LOSS]}\n")


if __name__ == "__main__":
    try:
        main()
    except ExlmError as error:
        sys.exit(str(error))
