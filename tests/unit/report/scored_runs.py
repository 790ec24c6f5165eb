"""Results of fine-tuning without any run on disk."""

from pathlib import Path
from typing import Any

from exlm_cli.finetune.results import BaselineResult, InitialWeights, RunResults, summarise_values
from exlm_cli.report.scores import FinetunedRun

Values = dict[str, list[float | None]]

EXLM = InitialWeights(
    checkpoint="runs/pre/checkpoints/step-1200", recipe="smiles-small", objective="exlm", steps=1200,
    tokens=13_100_000, num_states_per_mask=2, num_repeats=1, mask_ratio=0.15,
)  # fmt: skip


def scored(name: str, task: str, metrics: Values, **changed: Any) -> FinetunedRun:
    """Return a run of as many seeds as each metric has values; GLUE and SQuAD are scored on `valid` alone."""
    has_test = task.startswith(("moleculenet", "csv"))
    summaries = {metric: summarise_values(values) for metric, values in metrics.items()}
    seeds = tuple(range(1, 1 + len(next(iter(metrics.values())))))
    values: dict[str, Any] = {
        "task": task,
        "kind": "finetune",
        "recipe": "tiny",
        "init": EXLM,
        "parameters": 5_230_000,
        "input_kind": "smiles",
        "loss": "binary",
        "output_names": ("active",),
        "num_labels": 1,
        "split": "scaffold" if has_test else "official",
        "split_sizes": {"train": 1210, "valid": 151, "test": 152},
        "max_rows": None,
        "split_sha256": "ab" * 32,
        "selection_metric": next(iter(metrics)),
        "is_greater_better": True,
        "aggregate": "mean" if has_test else "median",
        "seeds": seeds,
        "best_epochs": tuple(3 * seed for seed in seeds),
        "elapsed_s": 3725.4,
        "tokens_per_s": 12345.6,
        "outside_model_share": 0.0123,
        "notes": (),
        "metrics": {"valid": summaries, "test": summaries} if has_test else {"valid": summaries},
        "grid_best": None,
        "grid": (),
    }
    return FinetunedRun(name, Path("runs") / name, RunResults(**{**values, **changed}))


def baseline(metrics: Values) -> BaselineResult:
    summaries = {metric: summarise_values(values) for metric, values in metrics.items()}
    return BaselineResult(name="ECFP4 + random forest", seeds=(1, 2), metrics={"test": summaries, "valid": summaries})
