"""Names of tasks: every mistake is told with the nearest name; columns say which kind of checkpoint a CSV needs."""

import subprocess
import sys
from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe, TaskConfig
from exlm_cli.config.load import list_recipes
from exlm_cli.errors import ConfigError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.registry import TASKS, check_task_name, default_recipe, find_task, input_kind_of, load_task


@pytest.mark.parametrize(("suite", "name"), [(s, n) for s, names in TASKS.items() for n in names])
def test_every_task_is_found_and_has_a_recipe(suite: str, name: str) -> None:
    assert find_task(suite, name) == f"{suite}/{name}"
    recipes = {info.name: info.recipe for info in list_recipes(FinetuneRecipe)}
    assert recipes[default_recipe(f"{suite}/{name}")].task.name == f"{suite}/{name}"


@pytest.mark.parametrize(
    ("suite", "name", "message", "hint"),
    [
        ("moleculenet", "base",
         "unknown task `base` of moleculenet; accepted: bace, bbbp, clintox, tox21, toxcast, sider, muv",
         "did you mean `exlm finetune moleculenet bace`?"),
        ("glue", "SST-2", "unknown task `SST-2` of glue; accepted: mnli, qqp, qnli, sst2, cola, rte, mrpc, stsb",
         "did you mean `exlm finetune glue sst2`?"),
        ("squad", "zzz", "unknown task `zzz` of squad; accepted: v2", "for example `exlm finetune squad v2`"),
        ("csv", "x", "`csv` has no task `x`: it is a file of your own", "for example `exlm finetune csv my_assay.csv`"),
        ("molculenet", "bace", "unknown suite `molculenet`; accepted: moleculenet, glue, squad, csv",
         "did you mean `exlm finetune moleculenet`?"),
        ("bace", "", "unknown suite `bace`; accepted: moleculenet, glue, squad, csv",
         "did you mean `exlm finetune moleculenet bace`?"),
        ("qqqqq", "", "unknown suite `qqqqq`; accepted: moleculenet, glue, squad, csv",
         "for example `exlm finetune moleculenet bace`"),
    ],
)  # fmt: skip
def test_a_misspelt_name_is_told_with_the_nearest(suite: str, name: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_task(suite, name)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("glue/rtee", "did you mean `glue/rte`?"), ("squad/zzz", "for example `squad/v2`"),
        ("molculenet/bace", "did you mean `moleculenet/bace`?"), ("rte", "did you mean `glue/rte`?"),
        ("cvs", "did you mean `csv`?"), ("qqqqq", "for example `moleculenet/bace`"),
        ("csv/x", "name the task `csv`, and the file with `--set task.files.train=FILE` (in a grid or sweep "
         "`--set finetune.task.files.train=FILE`)"),
    ],
)  # fmt: skip
def test_a_misspelt_name_in_a_recipe_or_a_grid_is_told_as_they_write_it(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_task_name(TaskConfig(name=name))
    assert caught.value.hint == hint


def test_a_recipe_with_an_unknown_task_is_refused_before_anything_is_read() -> None:
    for name in ("moleculenet/base", "molculenet/bace", "moleculenet"):
        with pytest.raises(ConfigError, match=r"^unknown (task|suite) "):
            load_task(TaskConfig(name=name), SilentProgress())


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"name": "moleculenet/bace"}, "smiles"), ({"name": "glue/rte"}, "text"), ({"name": "squad/v2"}, "text"),
        ({"name": "csv", "smiles_column": "s"}, "smiles"), ({"name": "csv"}, "smiles"),
        ({"name": "csv", "text_column": "t"}, "text"),
    ],
)  # fmt: skip
def test_the_kind_of_input_is_known_before_the_data_are_read(config: dict[str, Any], kind: str) -> None:
    assert input_kind_of(TaskConfig.model_validate(config)) == kind


def test_names_are_known_without_torch() -> None:
    script = "import sys, exlm_cli.tasks.registry; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
