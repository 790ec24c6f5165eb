"""Measurements of training steps as rows and as a table: times, shares, FLOPs, ratios to the MLM twin."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Self

from exlm_cli.config.describe import TrainingFlops, count_sequence_flops, recipe_step_flops
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.batch import Batch
from harness import Spread
from step_split import ORDER, Part

PAPER_HOURS = {"mlm": 54.7, "exlm": 104.2}
"""Table 12: k = 4, Table 5's settings, two A100 80G."""
WHOLE, SPLIT, ALONE = Part("step"), Part("split step"), Part("data alone")


@dataclass(frozen=True)
class StepSize:
    """Size of one step: FLOPs without padding, input tokens before expansion, positions without and with padding."""

    flops: TrainingFlops
    num_tokens: int
    num_positions: int
    num_padded: int

    @classmethod
    def of(cls, recipe: PretrainRecipe, batches: list[Batch], num_tokens: int) -> Self:
        """Return the size of the batches of a step."""
        flops = TrainingFlops()
        for batch in batches:
            for length, num_targets in zip(batch.lengths.tolist(), batch.target_lengths.tolist(), strict=True):
                flops += count_sequence_flops(recipe, length, num_targets)
        num_positions = sum(int(batch.lengths.sum()) for batch in batches)
        return cls(flops, num_tokens, num_positions, sum(batch.token_ids.numel() for batch in batches))


@dataclass
class Measured:
    """Measurements of one model, one value per round.

    Attributes:
        recipe: Recipe of the model, as in its file.
        batch_share: Share of the recipe's batch in each step.
        alignment, precision: Backend of the alignment, and precision of the model.
        times_ms: Times of each part.
        sizes: Sizes of whole and of split steps, which see different sequences.
    """

    recipe: PretrainRecipe
    batch_share: float
    alignment: str
    precision: str
    times_ms: dict[Part, list[float]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[Part, list[StepSize]] = field(default_factory=lambda: {WHOLE: [], SPLIT: []})

    def forget(self) -> None:
        """Drop all measurements, after the warm-up rounds."""
        self.times_ms.clear()
        for sizes in self.sizes.values():
            sizes.clear()

    def flops(self, part: Part) -> list[float]:
        """Return the FLOPs of a part over both passes, one value per round; zeros if they are not counted."""
        if part in (WHOLE, SPLIT):
            return [size.flops.total for size in self.sizes[part]]
        name = part.name if part.direction == "both" else ""
        return [float(getattr(size.flops, name, 0.0)) for size in self.sizes[SPLIT]]


def hours_of_steps(step_ms: float, num_steps: int, batch_share: float) -> float:
    """Return the hours of whole steps from the time of a share of one, with the optimiser counted 1 / share times."""
    return step_ms / batch_share * num_steps / 3.6e6


def paired_ratio(numerators: list[float], denominators: list[float]) -> Spread:
    """Return the spread of ratios within rounds (the unit in the names of the fields does not apply)."""
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def rows_of(measured: Measured, twin: Measured | None) -> list[dict[str, Any]]:
    """Return one row per part: time, share of the split step, FLOPs, and their ratios to the twin.

    Hours are for the mean step at the median speed, because steps of one row per sequence differ in length.

    Args:
        measured: Measurements of the model.
        twin: Measurements of its MLM twin; None for the MLM itself.
    """
    rows: list[dict[str, Any]] = []
    max_steps = measured.recipe.train.max_steps
    assert max_steps is not None, "every shipped recipe counts steps"
    sizes = [size for each in measured.sizes.values() for size in each]
    num_positions, num_padded = sum(s.num_positions for s in sizes), sum(s.num_padded for s in sizes)
    for part in sorted(measured.times_ms, key=_place):
        times_ms, flops = measured.times_ms[part], measured.flops(part)
        gflop_per_s = median(f / 1e6 / ms for f, ms in zip(flops, times_ms, strict=True))
        ratio = floor = None
        if twin is not None and part in twin.times_ms:
            ratio = paired_ratio(times_ms, twin.times_ms[part])
            floor = fmean(flops) / fmean(twin.flops(part)) if any(flops) else None
        hours = None
        if part == WHOLE:
            hours = hours_of_steps(fmean(flops) / 1e6 / gflop_per_s, max_steps, measured.batch_share)
        is_share = part not in (WHOLE, SPLIT, ALONE)
        rows.append(
            {
                "recipe": measured.recipe.name,
                "part": part.name,
                "pass": part.direction,
                **{key: round(value, 3) for key, value in asdict(Spread.of(times_ms)).items()},
                "share": round(sum(times_ms) / sum(measured.times_ms[SPLIT]), 4) if is_share else "",
                "gflop": round(fmean(flops) / 1e9, 3) if any(flops) else "",
                "gflop_per_s": round(gflop_per_s, 1) if any(flops) else "",
                "times_mlm": round(ratio.median_ms, 3) if ratio else "",
                "times_mlm_p20": round(ratio.p20_ms, 3) if ratio else "",
                "times_mlm_p80": round(ratio.p80_ms, 3) if ratio else "",
                "flops_times_mlm": round(floor, 3) if floor else "",
                "hours": round(hours, 3) if hours else "",
                "rounds": len(times_ms),
                "tokens": round(fmean(size.num_tokens for size in sizes)),
                "padding_share": round(1 - num_positions / num_padded, 4),
                "batch_share": measured.batch_share,
                "alignment": measured.alignment,
                "precision": measured.precision,
            }
        )
    return rows


def _place(part: Part) -> tuple[int, str]:
    names = (WHOLE.name, SPLIT.name, *ORDER, ALONE.name)
    return names.index(part.name), {"both": "", "forward": "a"}.get(part.direction, "b")


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows of one model."""
    first = rows[0]
    print(
        f"\n{first['recipe']}: {first['tokens']:,} tokens a step, {first['precision']}, "
        f"{first['padding_share']:.1%} of positions are padding"
    )
    print(f"{'':<13}{'median ms':>10}{'p20':>10}{'p80':>10}{'share':>8}{'GFLOP/s':>9}{'x MLM':>8}{'floor':>8}")
    for row in rows:
        label = row["part"] if row["pass"] == "both" else f"  {row['pass']}"
        times = "".join(f"{row[name]:>10.1f}" for name in ("median_ms", "p20_ms", "p80_ms"))
        share = "" if row["share"] == "" else f"{row['share']:.1%}"
        print(f"{label:<13}{times}{share:>8}{row['gflop_per_s']:>9}{row['times_mlm']:>8}{row['flops_times_mlm']:>8}")


def mlm_twin(exlm: PretrainRecipe) -> PretrainRecipe:
    """Return the MLM with the same data, encoder and steps."""
    changes = {"objective": "mlm", "masking.num_states_per_mask": 1, "model.rope": "1d"}
    return exlm.changed({"name": f"{exlm.name}-mlm"} | changes)


def conclude(exlm: list[dict[str, Any]], mlm: list[dict[str, Any]]) -> str:
    """Return the ratios and hours as text."""
    whole, split = exlm[0], exlm[1]
    floor = whole["flops_times_mlm"]
    paper = PAPER_HOURS["exlm"] / PAPER_HOURS["mlm"]
    of_paper = load_recipe("ablation-exlm")
    paper_floor = recipe_step_flops(of_paper).total / recipe_step_flops(mlm_twin(of_paper)).total
    return (
        f"ExLM / MLM: {whole['times_mlm']:.2f} ({whole['times_mlm_p20']:.2f} to {whole['times_mlm_p80']:.2f}); floor "
        f"{floor:.2f}, measured / floor {whole['times_mlm'] / floor:.2f}\n"
        f"Table 12 (ablation-exlm, two A100): {paper:.2f}; floor {paper_floor:.2f}, measured / floor "
        f"{paper / paper_floor:.2f}\n"
        f"Splitting a step costs {whole['gflop_per_s'] / split['gflop_per_s'] - 1:+.1%}\n"
        f"Hours for the recipe's steps: ExLM {whole['hours']:.3g}, MLM {mlm[0]['hours']:.3g}"
    )
