"""Identity of a recipe: equal for what decides nothing, another one for every value that decides a result."""

import pytest

from exlm_cli.config.base import Mark, identity_of, identity_values
from exlm_cli.config.sections import MaskingConfig
from tests.tiny import tiny_recipe
from tests.unit.finetune.synthetic import finetune_recipe

RESUMED = {Mark.INPUT, Mark.COMPUTING}


@pytest.mark.parametrize(
    ("sections", "is_other", "is_other_resumed"),
    [
        ({"name": "other"}, False, False),
        ({"device": "auto"}, False, False),
        ({"train": {"validate_every_steps": 77, "keep_last": 9}}, False, False),
        ({"data": {"cache_dir": "elsewhere"}}, False, False),
        ({"data": {"train": ["elsewhere.txt"]}}, True, False),
        ({"tokenizer": {"path": "t.json"}}, True, False),
        ({"train": {"alignment_backend": "reference"}}, True, False),
        ({"train": {"microbatch_tokens": 128}}, True, False),
        ({"train": {"num_threads": 1}}, True, False),
        ({"train": {"compile": True}}, True, False),
        ({"optim": {"lr": 2e-3}}, True, True),
        ({"seed": 3}, True, True),
        ({"masking": {"mask_ratio": 0.2}}, True, True),
    ],
)
def test_names_and_records_are_no_part_of_it_and_a_resumed_run_may_move_inputs_and_compute_in_another_way(
    sections, is_other, is_other_resumed
):
    changed, given = tiny_recipe(**sections), tiny_recipe()
    assert (identity_of(changed) != identity_of(given)) == is_other
    assert (identity_of(changed, without=RESUMED) != identity_of(given, without=RESUMED)) == is_other_resumed


def test_a_new_key_leaves_the_identity_of_older_recipes():
    """A section with one more key, at its default; any other value of it is another identity."""

    class LaterConfig(MaskingConfig):
        later: int = 0

    before, given = MaskingConfig(mask_ratio=0.3), {"mask_ratio": 0.3}
    assert identity_of(LaterConfig(**given)) == identity_of(before)
    assert identity_of(LaterConfig(**given, later=1)) != identity_of(before)


def test_fine_tuning_leaves_out_the_files_of_its_task_and_nothing_that_is_computed():
    values = identity_values(finetune_recipe(), without={Mark.INPUT})
    assert values.keys() == {"seeds", "num_replicates", "aggregate", "init", "task", "model", "optim", "train", "grid"}
    assert {"name", "sequence_length", "split_seed", "max_rows"} <= values["task"].keys()
    assert not {"data_dir", "files", "split_file"} & values["task"].keys()
    assert {"num_threads", "compile", "microbatch_tokens", "validate_every_steps"} <= values["train"].keys()
    assert not {"keep_last", "checkpoint_every_steps", "log_every_steps"} & values["train"].keys()
