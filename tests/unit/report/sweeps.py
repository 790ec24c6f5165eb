"""`result.json` of the variants of the paper's own sweeps, with the accuracies that it prints; entropies made up."""

from typing import Any

from exlm_cli.config.load import load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.report.paper_numbers import TABLE_2, TABLE_4, TABLE_13, PaperTable

TASKS = {"MNLI": "glue/mnli", "QNLI": "glue/qnli", "QQP": "glue/qqp", "RTE": "glue/rte"}

# our labels by the rows of each table
ROWS: dict[str, tuple[PaperTable, dict[str, str]]] = {
    "table-2": (
        TABLE_2,
        {
            "ExLM w/o 2D RoPE": "exlm-no-2d-rope",
            "ExLM w/o Transitions": "exlm-no-transitions",
            "Vanilla MLM": "mlm",
            "Vanilla MLM++": "mlm-plus-plus",
            "ExLM": "exlm",
        },
    ),
    "table-4": (
        TABLE_4,
        {
            "15% Vanilla MLM": "mlm",
            "15% ExLM-k=2": "exlm-k2",
            "15% ExLM-k=4": "exlm",
            "15% ExLM-k=8": "exlm-k8",
            "38.7% Vanilla MLM": "mlm-p38.7",
            "38.7% ExLM-k=2": "exlm-k2-p38.7",
            "38.7% ExLM-k=4": "exlm-k4-p38.7",
            "38.7% ExLM-k=8": "exlm-k8-p38.7",
        },
    ),
    "table-13": (
        TABLE_13,
        {
            "ExLM w/o Transitions": "exlm-no-transitions",
            "ExLM w/ Sparse DAG": "exlm-sparse-dag",
            "Vanilla MLM": "mlm",
            "ExLM": "exlm",
        },
    ),
}


def sweep_results(name: str, *, seeds: tuple[int, ...] = (1,), tasks: tuple[str, ...] = tuple(TASKS)) -> list[Any]:
    """Return a result for every variant and seed of a shipped sweep; seed s adds s - 1 hundredths to each figure.

    A variant of k states has an entropy of 10 p / k bits at p, weighted by the posterior half of that.
    """
    recipe = load_recipe(name, kind=SweepRecipe)
    results = []
    for seed in seeds:
        added = 0.01 * (seed - 1)
        for plan in recipe.plan_seed(seed):
            k, own = plan.pretrain.masking.num_states_per_mask, plan.pretrain.masking.mask_ratio
            has_dag = plan.pretrain.objective == "exlm" and plan.pretrain.model.alignment != "independent"
            entropies = [
                {
                    "mask_ratio": p,
                    "entropy_bits": 10 * p / k + added,
                    "entropy_posterior_bits": 5 * p / k + added if has_dag else None,
                }
                for p in dict.fromkeys((own, *recipe.entropy_ratios))
            ]
            dag = {"entropy_posterior_bits": 5 * own / k + added, "effective_states": 1.5, "path_entropy_bits": 0.25}
            metrics = {
                "loss": 2.0 + added,
                "perplexity": 7.0,
                "mask_accuracy": 0.5,
                "entropy_bits": 10 * own / k + added,
            }
            results.append(
                {
                    "label": plan.label,
                    "seed": seed,
                    **plan.about,
                    "steps": 600,
                    "elapsed_s": 61.0,
                    "parameters": 1_400_000,
                    "metrics": metrics | (dag if has_dag else {}),
                    "entropy": entropies,
                    "finetune": _scores(plan.label, tasks, added),
                }
            )
    return results


def diverge(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a variant that came to no end."""
    measured = {"steps", "elapsed_s", "parameters", "metrics", "entropy", "finetune"}
    return {key: value for key, value in result.items() if key not in measured} | {"diverged": "loss is nan"}


def _scores(label: str, tasks: tuple[str, ...], added: float) -> dict[str, Any]:
    """Return three seeds around the accuracy that the paper prints for a variant, on some columns of its tables."""
    printed = {
        column: table.value(row, column) for table, rows in ROWS.values() for row, own in rows.items() if own == label
        for column in tasks
    }  # fmt: skip
    return {
        TASKS[column]: {
            "metric": "accuracy",
            "values": [v / 100 - 0.01 + added, v / 100 + added, v / 100 + 0.01 + added],
            "split_sizes": {"train": 1000, "valid": 100},
            "max_rows": None,
        }
        for column, v in printed.items()
    }
