"""Hints name a key as the command at hand takes it; every such name is taken by the recipes it is for."""

import pytest

from exlm_cli.config.keys import find_field
from exlm_cli.config.repeat_mlm import RepeatMlmRecipe
from exlm_cli.config.spelling import how_to_set


@pytest.mark.parametrize(
    ("key", "option", "said"),
    [
        ("data.column", None, "`--set data.column=X` (in a grid or sweep `--set pretrain.data.column=X`)"),
        ("task.data_dir", "--data-dir X",
         "`--data-dir X` (in a grid or sweep `--set finetune.task.data_dir=X`)"),
    ],
)  # fmt: skip
def test_a_key_is_spelt_for_a_single_run_and_for_a_grid(key: str, option: str | None, said: str) -> None:
    assert how_to_set(key, "X", option) == said
    in_a_grid = said.rpartition("--set ")[2].partition("=")[0]
    assert find_field(RepeatMlmRecipe, in_a_grid) is not None
