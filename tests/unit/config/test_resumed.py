"""Which directories a command goes on with."""

from pathlib import Path

import pytest

from exlm_cli.config.base import Recipe
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import dump_recipe, load_recipe, resumed_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError

KINDS: tuple[type[Recipe], ...] = (PretrainRecipe, SweepRecipe, FinetuneRecipe)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begun", KINDS)
def test_a_run_goes_on_with_the_command_that_began_it(tmp_path: Path, begun: type[Recipe], kind: type[Recipe]) -> None:
    recipe = load_recipe(begun.example, kind=begun)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    (tmp_path / "run.json").write_text("{}")
    if kind is begun:
        changed = resumed_recipe(tmp_path, kind, ["device=cuda"])
        assert changed == recipe.model_copy(update={"device": "cuda"})
        return
    with pytest.raises(CheckpointError) as error:
        resumed_recipe(tmp_path, kind)
    assert error.value.message == f"{tmp_path}: a run of `exlm {begun.command}`, not of `exlm {kind.command}`"
    assert error.value.hint == f"`exlm {begun.command.split()[0]} --resume {tmp_path}` continues it"


def test_a_folder_of_tokens_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a run directory: it has no recipe.yaml$"):
        resumed_recipe(tmp_path, PretrainRecipe)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(load_recipe("text-small")))
    with pytest.raises(CheckpointError, match=r"not a run directory: it has no run.json$") as error:
        resumed_recipe(tmp_path, PretrainRecipe)
    assert error.value.hint == "give the directory that `exlm pretrain` named"
