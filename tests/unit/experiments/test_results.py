"""Result files of cells: what is written is read back, what is damaged is refused; sweeps among other runs."""

import json
import math

import pytest

from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError
from exlm_cli.experiments.results import MeasuredCell, SweepRun, cell_folder, load_sweep_run, read_cell_result
from exlm_cli.files import write_json
from tests.unit.report.results import (
    DIVERGED,
    diverge,
    grid_results,
    scores,
    sweep_results,
    with_metrics,
    with_scores,
    write_cell,
)


def test_a_result_is_read_back_as_it_was_and_that_of_a_diverged_cell_lacks_what_it_never_reached(tmp_path):
    path = tmp_path / "result.json"
    assert read_cell_result(tmp_path) is None
    for cell in (sweep_results("table-2")[0], grid_results()[0], diverge(grid_results()[1])):
        result = cell.result
        write_json(path, result)
        assert read_cell_result(tmp_path) == result
        keys = json.loads(path.read_text()).keys()
        assert ("diverged" in keys) == ("steps" not in keys) == (result.diverged is not None)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"steps": None, "seed": "one"}, "seed"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"finetune": {"glue/rte": {"metric": "accuracy"}}}, "finetune.glue/rte"),
    ],
)
def test_a_damaged_result_is_refused_with_its_path_and_key(tmp_path, changes, key):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(grid_results()[0].result.model_dump(mode="json") | changes))
    with pytest.raises(CheckpointError, match=rf"result\.json: .*{key}"):
        read_cell_result(tmp_path)


def test_the_scores_of_a_cell_are_read_back_and_damaged_ones_are_refused(tmp_path):
    cell = with_metrics(sweep_results("quickstart-ablations", seeds=(3,))[0], loss=None)
    write_cell(tmp_path / "cell", cell)
    read = MeasuredCell(tmp_path / "cell", cell.result)
    assert read.scores.equals(cell.scores)
    assert read.scores.task.unique().tolist() == ["", *cell.tuned]
    assert math.isnan(read.value("loss"))
    assert read.value("glue/mnli mismatched_accuracy") == cell.value("glue/mnli mismatched_accuracy")
    path = tmp_path / "cell" / "scores.csv"
    path.write_text(path.read_text().replace("perplexity,7.0", "perplexity,seven"))
    with pytest.raises(CheckpointError, match=r"scores\.csv: not readable as scores: .*seven") as caught:
        assert MeasuredCell(tmp_path / "cell", cell.result).scores
    assert caught.value.hint.startswith("delete result.json beside it")


@pytest.mark.parametrize(
    ("aggregate", "values", "score"),
    [("mean", (0.1, None, 0.9), 0.5), ("median", (0.1, 0.2, 0.9), 0.2), ("median", (None,), math.nan)],
)
def test_a_task_has_the_score_that_the_recipe_reports(aggregate, values, score):
    found = with_scores(grid_results()[0], glue_rte=scores(values, aggregate=aggregate)).value("glue/rte accuracy")
    assert found == pytest.approx(score, nan_ok=True)


def test_results_come_in_the_order_of_the_recipe(tmp_path):
    recipe = load_recipe("table-13", ["seeds=[2, 5]"], kind=SweepRecipe)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    with pytest.raises(CheckpointError, match=r": none of its 8 cells is done$"):
        load_sweep_run(tmp_path)
    cells, results = recipe.plan(), sweep_results("table-13", seeds=(2, 5))
    for index in (6, 1):
        write_cell(cell_folder(tmp_path, cells[index]), results[index])
    sweep = load_sweep_run(tmp_path)
    assert (sweep.recipe, sweep.num_cells) == (recipe, 8)
    assert [cell.result for cell in sweep.cells] == [results[1].result, results[6].result]


def test_a_cell_is_done_if_it_diverged_or_has_every_task_of_the_recipe(tmp_path):
    recipe = load_recipe("table-13", ["tasks=[glue/mnli, glue/rte]"], kind=SweepRecipe)
    one, other, third, fourth = sweep_results("table-13", tasks=("MNLI",))
    results = [
        one,
        with_scores(other, glue_rte=scores((0.5,))),
        with_scores(third, glue_rte=DIVERGED),
        diverge(fourth),
    ]
    sweep = SweepRun(tmp_path, recipe, results, 4)
    assert (sweep.num_done, sweep.num_diverged) == (3, 2)
