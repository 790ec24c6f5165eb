"""Results of fine-tuning as `exlm eval` reads them, without any run on disk."""

from pathlib import Path
from typing import Any

from exlm_cli.experiments.scores import FinetunedRun
from exlm_cli.finetune.results import summarise_values


def scored(name: str, task: str, metrics: dict[str, list[float | None]], **changed: Any) -> FinetunedRun:
    """Return a run of as many seeds as each metric has values; GLUE and SQuAD are scored on `valid`."""
    split = "test" if task.startswith(("moleculenet", "csv")) else "valid"
    results: dict[str, Any] = {
        "task": task,
        "init": {
            "checkpoint": "runs/pre/checkpoints/step-1200", "recipe": "smiles-small", "objective": "exlm",
            "steps": 1200, "tokens": 13_100_000,
        },
        "parameters": 5_230_000,
        "loss": "binary",
        "output_names": ["active"],
        "split": "scaffold" if split == "test" else "official",
        "split_sizes": {"train": 1210, "valid": 151, "test": 152},
        "split_sha256": "ab" * 32,
        "max_rows": None,
        "selection_metric": next(iter(metrics)),
        "aggregate": "mean" if split == "test" else "median",
        "seeds": list(range(1, 1 + len(next(iter(metrics.values()))))),
        "metrics": {split: {metric: summarise_values(values).as_json() for metric, values in metrics.items()}},
    }  # fmt: skip
    return FinetunedRun(name, Path("runs") / name, {**results, **changed})


def yardstick(metrics: dict[str, list[float | None]]) -> dict[str, Any]:
    summaries = {metric: summarise_values(values).as_json() for metric, values in metrics.items()}
    return {"name": "ECFP4 + random forest", "seeds": [1, 2], "metrics": {"test": summaries}}
