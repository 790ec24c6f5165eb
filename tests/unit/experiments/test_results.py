"""A sweep read back: what was written is read, in the order of the recipe; sweeps among other runs."""

import math

from exlm_cli.config.load import load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.experiments.results import CellRuns, SweepRun
from tests.unit.report.results import DIVERGED, altered, scores, sweep_results, write_cell


def test_the_scores_of_a_cell_and_of_its_tasks_are_read_back(tmp_path):
    """A task has the score that its recipe reports; here the median."""
    tasks = {"glue/rte": scores((0.1, 0.2, 0.9), aggregate="median")}
    cell = altered(sweep_results("table-2", seeds=(3,))[0], metrics={"loss": None}, tasks=tasks)
    read = CellRuns(cell.plan, write_cell(tmp_path / "cell", cell))
    assert read.scores.equals(cell.scores)
    assert set(read.scores.pretrain_seed) == {3}
    assert read.scores.task.unique().tolist() == ["", *cell.tuned]
    assert read.task_metrics == [f"{task} accuracy" for task in cell.tuned]
    assert math.isnan(read.value("loss"))
    assert read.value("glue/rte accuracy") == 0.2
    assert read.value("glue/mnli mismatched_accuracy") == cell.value("glue/mnli mismatched_accuracy")


def test_a_cell_is_done_if_it_diverged_or_has_every_task_of_the_recipe(tmp_path):
    recipe = load_recipe("table-13", ["tasks=[glue/mnli, glue/rte]"], kind=SweepRecipe)
    made = sweep_results("table-13", tasks=("MNLI",))
    made[1:] = [
        altered(made[1], tasks={"glue/rte": scores((0.5,))}),
        altered(made[2], tasks={"glue/rte": DIVERGED}),
        altered(made[3], steps=None),
    ]
    cells = [CellRuns(plan, tmp_path / plan.name) for plan in recipe.plan()]
    for cell, of in zip(cells, made, strict=True):
        write_cell(cell.folder, of)
        run = cell.pretrain if of.diverged else cell.task_folder("glue/rte")
        if of.diverged or of.diverged_tasks:
            run.mkdir(parents=True, exist_ok=True)
            (run / "diverged.json").write_text('{"step": 2, "epoch": 0, "value": "nan", "sample_index": [1]}')
    sweep = SweepRun(tmp_path, recipe, cells, 4)
    assert (sweep.num_done, sweep.num_diverged) == (3, 2)
    assert [task.task.name for task in cells[0].waiting_tasks] == ["glue/rte"]
    assert (cells[2].diverged_tasks, cells[3].diverged) == ({"glue/rte": "step 3"}, "step 3")
