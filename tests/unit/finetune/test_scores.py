"""The table of scores: means against numpy, the choices made from it, and a file that gives every number back."""

import math

import numpy as np
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.scores import (
    AVERAGE,
    COLUMNS,
    MODEL,
    Origin,
    RunScores,
    best_seed,
    join_scores,
    make_scores,
    point_scores,
    read_scores,
    score_rows_of,
    write_scores,
)
from tests.unit.report.results import scored

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([0.5, 0.9, 0.7], (0.7, np.std([0.5, 0.9, 0.7], ddof=1), 0.7, 0.5, 0.9, 3)),
        ([0.5], (0.5, NAN, 0.5, 0.5, 0.5, 1)),
        ([None, 0.5], (0.5, NAN, 0.5, 0.5, 0.5, 1)),
        ([None, None], (NAN, NAN, NAN, NAN, NAN, 0)),
    ],
)
def test_a_spread_is_mean_sample_deviation_and_median_of_what_is_defined(values, spread):
    found = scored("a", "csv", {"rmse": values}).scores.seeds("test", "rmse")
    assert found == pytest.approx(spread, nan_ok=True)
    assert found.center("mean") == pytest.approx(spread[0], nan_ok=True)
    assert found.center("median") == pytest.approx(spread[2], nan_ok=True)


def of_points(**by_point: list[float | None]) -> RunScores:
    """Return validation scores of the seeds 5, 2 and 8 at grid points; all test scores are 9."""
    return make_scores(
        row
        for point, values in by_point.items()
        for seed, value in zip((5, 2, 8), values, strict=True)
        for row in score_rows_of(
            Origin(MODEL, point, 0, seed), {"valid": {"f1": value}, "test": {"f1": 9.0}}, {"valid": {"a": {"f1": 7.0}}}
        )
    )


def test_a_grid_point_is_judged_by_its_aggregate_in_validation():
    scores = of_points(a=[0.1, 0.2, 0.9], b=[None] * 3)
    assert point_scores(scores, "f1", "median") == pytest.approx({"a": 0.2, "b": NAN}, nan_ok=True)
    assert point_scores(scores, "f1", "mean") == pytest.approx({"a": 0.4, "b": NAN}, nan_ok=True)


@pytest.mark.parametrize(
    ("values", "greatest", "least"), [([0.2, 0.9, 0.9], 2, 5), ([-3.0, None, -1.0], 8, 5), ([None] * 3, 5, 5)]
)
def test_the_best_seed_is_that_of_the_greatest_score_or_of_the_least_error(values, greatest, least):
    """The first of equals; a seed without a score is never better than one with a score."""
    scores = of_points(a=[1.0, 0.0, 0.5], b=values)
    assert best_seed(scores, "b", "f1", is_greater_better=True) == greatest
    assert best_seed(scores, "b", "f1", is_greater_better=False) == least


def test_only_the_point_that_is_reported_counts_and_each_split_has_its_own():
    rows = list(of_points(a=[0.1, 0.2, 0.3], b=[0.5, 0.6, 0.7]).table.itertuples(index=False, name=None))
    rows += score_rows_of(Origin(MODEL, "b", 0, AVERAGE), {"valid": {"f1": 0.65}}, {})
    rows += score_rows_of(Origin(MODEL, "a", 1, 5), {"valid": {"f1": 0.9}}, {})
    rows += score_rows_of(Origin(MODEL, "a", 1, AVERAGE), {"valid": {"f1": 0.95}}, {})
    rows += score_rows_of(Origin(MODEL, "b", 1, 5), {"valid": {"f1": 0.0}}, {})
    scores = make_scores(rows)
    assert scores.by_seed("valid", "f1").value.tolist() == [0.5, 0.6, 0.7, 0.9]
    assert scores.by_split("valid", "f1") == {0: 0.65, 1: 0.95}
    assert scores.average("valid", "f1").mean == pytest.approx(0.8)
    assert scores.of_seed("valid", 2, 0) == {"f1": 0.6}


def test_a_table_comes_back_with_every_digit_and_name(tmp_path):
    """Also of labels that look like missing values or hold what CSV must quote."""
    labels = {name: {"rmse": [1 / 3, 1e-300]} for name in ("NA", "nan", 'a,"b"')}
    labels["1"] = {"rmse": [0.1 + 0.2, -0.0]}
    scores = scored("a", "csv", {"rmse": [2 / 3, None]}, labels=labels, split_seeds=(0,), seeds=(1, 2**62)).scores
    write_scores(tmp_path, scores)
    read = read_scores(tmp_path)
    assert list(read.table.columns) == list(COLUMNS)
    assert read.table.equals(scores.table)
    assert join_scores([read, scores]).table.shape[0] == 2 * len(scores.table)
    assert (tmp_path / "scores.csv").read_text().splitlines()[1] == f"exlm,single,0,1,valid,,rmse,{2 / 3!r}"


HEADER = "model,grid_point,split_seed,seed,split,label,metric,value\n"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "model\n",
        HEADER,  # no average of the seeds
        f"{HEADER}exlm,single,x,1,test,,rmse,1\n",
        f"{HEADER}exlm,single,0,average,test,,rmse,much\n",
        f"{HEADER}exlm,single,0,average,test,,rmse,1,2,3\n",
    ],
)
def test_altered_scores_are_refused(tmp_path, content):
    (tmp_path / "scores.csv").write_text(content)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/scores.csv: ") as caught:
        read_scores(tmp_path)
    assert caught.value.hint == f"`exlm finetune --resume {tmp_path}` writes it again"
