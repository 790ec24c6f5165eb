"""Result files of cells: what is written is read back, what is damaged is refused; sweeps among other runs."""

import json

import pytest

from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError
from exlm_cli.experiments.results import (
    DivergedTask,
    SweepCellResult,
    SweepRun,
    cell_folder,
    load_sweep_run,
    read_cell_file,
)
from exlm_cli.files import write_json
from tests.unit.report.results import diverge, grid_results, scores, sweep_results, with_scores


def test_a_result_is_read_back_as_it_was_and_that_of_a_diverged_cell_lacks_what_it_never_reached(tmp_path):
    path = tmp_path / "result.json"
    assert read_cell_file(path, SweepCellResult) is None
    for result in (sweep_results("table-2")[0], grid_results()[0], diverge(grid_results()[1])):
        write_json(path, result)
        assert read_cell_file(path, SweepCellResult) == result
        keys = json.loads(path.read_text()).keys()
        assert ("diverged" in keys) == ("steps" not in keys) == (result.diverged is not None)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"steps": None, "seed": "one"}, "seed"),
        ({"metrics": {"loss": "x"}}, "metrics.loss"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"finetune": {"glue/rte": {"metric": "accuracy"}}}, "finetune.glue/rte"),
    ],
)
def test_a_damaged_result_is_refused_with_its_path_and_key(tmp_path, changes, key):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(grid_results()[0].model_dump(mode="json") | changes))
    with pytest.raises(CheckpointError, match=rf"result\.json: .*{key}"):
        read_cell_file(path, SweepCellResult)


def test_a_finished_result_without_its_steps_is_refused(tmp_path):
    content = grid_results()[0].model_dump(mode="json")
    del content["steps"]
    (tmp_path / "result.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="`steps` is missing"):
        read_cell_file(tmp_path / "result.json", SweepCellResult)


@pytest.mark.parametrize(
    ("aggregate", "values", "score"),
    [("mean", (0.1, None, 0.9), 0.5), ("median", (0.1, 0.2, 0.9), 0.2), ("median", (None,), None)],
)
def test_a_task_has_the_score_that_the_recipe_reports(aggregate, values, score):
    found = scores(values, aggregate=aggregate).score
    assert found == (None if score is None else pytest.approx(score))


def test_results_come_in_the_order_of_the_recipe(tmp_path):
    recipe = load_recipe("table-13", ["seeds=[2, 5]"], kind=SweepRecipe)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    with pytest.raises(CheckpointError, match=r": none of its 8 cells is done$"):
        load_sweep_run(tmp_path)
    cells, results = recipe.plan(), sweep_results("table-13", seeds=(2, 5))
    for index in (6, 1):
        folder = cell_folder(tmp_path, cells[index])
        folder.mkdir(parents=True)
        write_json(folder / "result.json", results[index])
    sweep = load_sweep_run(tmp_path)
    assert (sweep.recipe, sweep.num_cells, sweep.results) == (recipe, 8, [results[1], results[6]])


def test_a_cell_is_done_if_it_diverged_or_has_every_task_of_the_recipe(tmp_path):
    recipe = load_recipe("table-13", ["tasks=[glue/mnli, glue/rte]"], kind=SweepRecipe)
    one, other, third, fourth = sweep_results("table-13", tasks=("MNLI",))
    results = [
        one,
        with_scores(other, glue_rte=scores((0.5,))),
        with_scores(third, glue_rte=DivergedTask(identity="x", diverged="the loss is nan")),
        diverge(fourth),
    ]
    sweep = SweepRun(tmp_path, recipe, results, 4)
    assert (sweep.num_done, sweep.num_diverged) == (3, 2)
