"""Files of cells: what is there, what is not there yet, and what is damaged; grids told from other runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.repeat_mlm import RepeatMlmRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.experiments.cell_files import cell_folder, is_grid_run, load_grid_run, read_cell_file, task_score
from exlm_cli.finetune.result_shapes import WrittenGridCell, WrittenModel
from exlm_cli.run_dir import update_run_json


def test_a_file_that_is_not_there_yet_is_no_error(tmp_path: Path) -> None:
    assert read_cell_file(tmp_path / "result.json", WrittenModel) is None
    (tmp_path / "result.json").write_text('{"a": 1}')
    assert read_cell_file(tmp_path / "result.json", WrittenModel) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not readable as JSON: .*"),
        ("[1]", "holds a list, a JSON object is expected"),
        ('{"seed": 1}', "`steps` is missing"),
        ('{"seed": 1, "steps": 3, "metrics": {"loss": 1}, "finetune": {"glue/rte": {"metric": "accuracy"}}}',
         "`finetune.glue/rte`: `values` is missing"),
        ('{"seed": "one", "diverged": "loss"}', "`seed` is 'one': input should be a valid integer"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"result\.json: {said}$") as caught:
        read_cell_file(path, WrittenGridCell)
    assert caught.value.hint == "remove the file; what it held is measured again"


@pytest.mark.parametrize(
    ("aggregate", "values", "score"),
    [
        ({}, [0.1, 0.2, 0.9], 0.4),
        ({"aggregate": "mean"}, [0.1, None, 0.9], 0.5),
        ({"aggregate": "median"}, [0.1, 0.2, 0.9], 0.2),
        ({"aggregate": "median"}, [None], None),
    ],
)
def test_a_task_has_the_score_that_the_recipe_reports(
    aggregate: dict[str, str], values: list[float | None], score: float | None
) -> None:
    assert task_score({"values": values} | aggregate) == (None if score is None else pytest.approx(score))


def test_a_grid_is_told_from_other_directories(tmp_path: Path) -> None:
    assert not is_grid_run(tmp_path)
    (tmp_path / "recipe.yaml").write_text("extends: text-small\n")
    update_run_json(tmp_path, {"command": "pretrain"})
    assert not is_grid_run(tmp_path)
    update_run_json(tmp_path, {"num_cells": 4})
    assert is_grid_run(tmp_path)


def test_a_key_of_another_version_is_told_as_such(tmp_path: Path) -> None:
    recipe = dump_recipe(load_recipe("quickstart-repeat-mlm", kind=RepeatMlmRecipe))
    (tmp_path / "recipe.yaml").write_text(recipe + "once_known: 3\n")
    update_run_json(tmp_path, {"command": "repeat-mlm", "num_cells": 4})
    with pytest.raises(ConfigError, match="unknown key `once_known`"):
        load_grid_run(tmp_path)


def test_what_is_done_comes_in_the_order_of_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("table-13", ["seeds=[2, 5]"], kind=SweepRecipe)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    with pytest.raises(CheckpointError, match=r": none of its 8 cells is done$"):
        load_grid_run(tmp_path)
    plans = recipe.plan()
    whole: dict[str, Any] = {"steps": 3, "metrics": {"loss": 0.5}, "finetune": {}}
    for plan in (plans[6], plans[1]):
        folder = cell_folder(tmp_path, plan)
        assert folder == tmp_path / "cells" / plan.label / f"seed-{plan.seed}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(whole | {"label": plan.label, "seed": plan.seed}))
    grid = load_grid_run(tmp_path)
    assert (grid.recipe, grid.num_cells) == (recipe, 8)
    assert grid.cells == [whole | {"label": "exlm-sparse-dag", "seed": 2}, whole | {"label": "mlm", "seed": 5}]
