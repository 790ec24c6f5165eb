"""What was measured of training steps, as rows and as a table: times, shares, FLOPs, multiples of the MLM twin."""

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from exlm_cli.analysis.cost import TrainingFlops, count_sequence_flops
from exlm_cli.config.recipes import PretrainRecipe
from exlm_cli.data.batch import Batch
from harness import Spread
from step_split import ORDER, Part

PAPER_HOURS = {"mlm": 54.7, "exlm": 104.2}
"""Table 12: k = 4, Table 5's settings, two A100 80G."""
WHOLE, SPLIT, ALONE = Part("step"), Part("split step"), Part("data alone")


@dataclass
class Measured:
    """What was measured of one model, a value a round.

    Attributes:
        recipe: What was trained, as the file has it.
        batch_share: Of the recipe's step that was done in one.
        alignment, precision: What the model ran with.
        times_ms: By part.
        flops: Of a whole step, without padding.
        num_tokens: Input tokens of a step, before expansion.
        num_positions: Expanded positions, without padding.
        num_padded: With it.
    """

    recipe: PretrainRecipe
    batch_share: float
    alignment: str
    precision: str
    times_ms: dict[Part, list[float]] = field(default_factory=dict)
    flops: list[TrainingFlops] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_positions: list[int] = field(default_factory=list)
    num_padded: list[int] = field(default_factory=list)

    def add(self, part: Part, time_ms: float) -> None:
        """Keep a time of this round."""
        self.times_ms.setdefault(part, []).append(time_ms)

    def add_sizes(self, batches: list[Batch], num_tokens: int) -> None:
        """Keep the sizes of a step."""
        flops, vocab_size = TrainingFlops(), self.recipe.tokenizer.vocab_size
        for batch in batches:
            for length, num_targets in zip(batch.lengths.tolist(), batch.target_lengths.tolist(), strict=True):
                flops += count_sequence_flops(self.recipe, length, num_targets, vocab_size)
        self.flops.append(flops)
        self.num_tokens.append(num_tokens)
        self.num_positions.append(sum(int(batch.lengths.sum()) for batch in batches))
        self.num_padded.append(sum(batch.token_ids.numel() for batch in batches))

    def forget(self) -> None:
        """Drop it all, as of rounds that only warm up."""
        for values in (self.times_ms, self.flops, self.num_tokens, self.num_positions, self.num_padded):
            values.clear()


def hours_of_steps(step_ms: float, num_steps: int, batch_share: float) -> float:
    """Hours of whole steps, from the time of a share of one; the optimiser then counts 1 / share times, not once."""
    return step_ms / batch_share * num_steps / 3.6e6


def paired_ratio(numerators: list[float], denominators: list[float]) -> Spread:
    """Spread of the ratios of what was measured in the same rounds (the unit of the fields does not apply)."""
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def part_flops(part: Part, flops: TrainingFlops) -> float:
    """FLOPs of a part over both passes; 0 where they are not counted."""
    if part in (WHOLE, SPLIT):
        return flops.total
    return float(getattr(flops, part.name, 0.0)) if part.direction == "both" else 0.0


def floor_ratio(part: Part, exlm: Measured, mlm: Measured) -> float | None:
    """FLOPs of ExLM over those of the MLM, all rounds together; None where the MLM has none to count."""
    mlm_flops = sum(part_flops(part, flops) for flops in mlm.flops)
    return sum(part_flops(part, flops) for flops in exlm.flops) / mlm_flops if mlm_flops else None


def rows_of(measured: Measured, twin: Measured | None) -> list[dict[str, Any]]:
    """One row a part: its time, its share of the split step, its FLOPs, and all that as multiples of the twin's.

    Args:
        measured: Of the model that the rows are about.
        twin: Of its MLM; none: it is the MLM itself.
    """
    rows: list[dict[str, Any]] = []
    max_steps = measured.recipe.train.max_steps
    assert max_steps is not None, "no recipe of the paper counts epochs"
    for part in sorted(measured.times_ms, key=_place):
        times_ms = measured.times_ms[part]
        spread = Spread.of(times_ms)
        flops = median(part_flops(part, each) for each in measured.flops)
        ratio = floor = None
        if twin is not None and part in twin.times_ms:
            ratio = paired_ratio(times_ms, twin.times_ms[part])
            floor = floor_ratio(part, measured, twin)
        is_share = part not in (WHOLE, SPLIT, ALONE)
        rows.append(
            {
                "recipe": measured.recipe.name,
                "part": part.name,
                "pass": part.direction,
                **{key: round(value, 3) for key, value in asdict(spread).items()},
                "share": round(sum(times_ms) / sum(measured.times_ms[SPLIT]), 4) if is_share else "",
                "gflop": round(flops / 1e9, 3) if flops else "",
                "gflop_per_s": round(flops / 1e6 / spread.median_ms, 1) if flops else "",
                "times_mlm": round(ratio.median_ms, 3) if ratio else "",
                "times_mlm_p20": round(ratio.p20_ms, 3) if ratio else "",
                "times_mlm_p80": round(ratio.p80_ms, 3) if ratio else "",
                "flops_times_mlm": round(floor, 3) if floor else "",
                "hours": round(hours_of_steps(spread.median_ms, max_steps, measured.batch_share), 3)
                if part == WHOLE
                else "",
                "rounds": len(times_ms),
                "tokens": round(median(measured.num_tokens)),
                "padding_share": round(1 - sum(measured.num_positions) / sum(measured.num_padded), 4),
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
    """Print one model's rows."""
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


def conclude(exlm: list[dict[str, Any]], mlm: list[dict[str, Any]]) -> str:
    """Return the ratios and hours in words."""
    whole, split = exlm[0], exlm[1]
    floor = whole["flops_times_mlm"]
    paper = PAPER_HOURS["exlm"] / PAPER_HOURS["mlm"]
    return (
        f"ExLM / MLM: {whole['times_mlm']:.2f} ({whole['times_mlm_p20']:.2f} to {whole['times_mlm_p80']:.2f}); floor "
        f"{floor:.2f}, measured / floor {whole['times_mlm'] / floor:.2f}\n"
        f"(the paper, text, k = 4, two A100: {paper:.2f}). Splitting a step costs "
        f"{split['median_ms'] / whole['median_ms'] - 1:+.1%}.\n"
        f"Hours for the recipe's steps: ExLM {whole['hours']:.3g}, MLM {mlm[0]['hours']:.3g}"
    )
