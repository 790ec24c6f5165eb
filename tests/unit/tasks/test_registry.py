"""The registry loads each suite's task, and every task has its recipe."""

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.tasks import SUITES
from exlm_cli.tasks.registry import default_recipe


@pytest.mark.parametrize("task", [task for section in SUITES.values() for task in section.tasks])
def test_every_task_has_a_recipe_of_its_own(task: str) -> None:
    assert load_recipe(default_recipe(task), kind=FinetuneRecipe).task.name == task
