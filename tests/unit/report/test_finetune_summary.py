"""The summary of a fine-tuning run: every score with its spread, what is not defined said, 80 columns enough."""

import io
from typing import Any

import pytest
from rich.console import Console

from exlm_cli.finetune.results import summarise_values
from exlm_cli.report.finetune_summary import format_score, render_summary

RESULTS: dict[str, Any] = {
    "task": "moleculenet/bace",
    "init": {
        "checkpoint": "runs/x",
        "recipe": "smiles-small",
        "objective": "exlm",
        "steps": 1200,
    },
    "seeds": [1, 2, 3],
    "split_sizes": {"train": 1210, "valid": 151, "test": 152},
    "selection_metric": "roc_auc",
    "aggregate": "mean",
    "best_epochs": [3, 17, 20],
    "elapsed_s": 3725.4,
    "tokens_per_s": 12345.6,
    "outside_model_share": 0.0123,
    "notes": ["left out 5 rows"],
    "grid_best": None,
    "grid": [],
    "metrics": {
        split: {
            "loss": summarise_values([0.5, 0.6, 0.7]).as_json(),
            "accuracy": summarise_values([0.5, None, None]).as_json(),
            "roc_auc": summarise_values([0.7, 0.8, 0.9]).as_json(),
        }
        for split in ("valid", "test")
    },
}


def render(results: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=80).print(render_summary(results, "runs/y"))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("values", "aggregate", "text"),
    [
        ([0.7, 0.8, 0.9], "mean", "0.8000 ± 0.1000"),
        ([0.7, 0.85, 0.9], "median", "0.8500 (0.7000 to 0.9000)"),
        ([0.7], "mean", "0.7000"),
        ([None, 0.7], "median", "0.7000"),
        ([None], "mean", "not defined"),
        ([0.0, 0.0], "mean", "0.0000 ± 0.0000"),
        ([7.606e-8, 7.606e-8, 8.2e-8], "mean", "7.804e-08 ± 3.429e-09"),
        ([7.606e-8, 9.1e-8], "median", "8.353e-08 (7.606e-08 to 9.1e-08)"),
        ([1.1060511823970e36], "mean", "1.106e+36"),
        ([-0.0004123], "mean", "-0.0004123"),
    ],
)
def test_a_score_is_shown_with_its_spread(values: list[float | None], aggregate: str, text: str) -> None:
    assert format_score(summarise_values(values).as_json(), aggregate) == text


def test_the_metric_that_chose_comes_first_and_everything_fits() -> None:
    lines = render(RESULTS)
    assert max(map(len, lines)) <= 80
    rows = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("loss", "accuracy", "roc_auc")]
    assert rows == ["roc_auc", "accuracy", "loss"]
    text = "\n".join(lines)
    assert "1,210/151/152 rows" in text
    assert "exlm smiles-small after 1,200 steps" in text
    assert "note: left out 5 rows" in text
    assert "best epochs by validation roc_auc: 3, 17, 20" in text
    assert "trained in 1:02:05, 12,346 tokens/s, 1.2 % of it outside the model" in text
    assert lines[-1] == "results: runs/y/results.json"


def test_scratch_one_seed_a_grid_and_the_yardstick_are_said() -> None:
    scratch = {"checkpoint": None, "recipe": "smiles-small", "objective": "scratch", "steps": 0}
    changed = {
        "init": scratch,
        "seeds": [7],
        "grid_best": {"label": "lr-1e-05", "values": {"optim.lr": 1e-5, "train.max_epochs": 3}},
        "grid": [{}, {}, {}],
        "yardstick": {"name": "ECFP4 + random forest", "metrics": RESULTS["metrics"]},
    }
    text = "\n".join(render({**RESULTS, **changed}))
    assert "scratch smiles-small, seed 7" in text
    assert "best of 3 grid points: optim.lr=1e-05, train.max_epochs=3" in text
    assert "ECFP4 + random forest" in text
    assert text.count("0.8000 ± 0.1000") == 4
