"""Identity of a recipe: equal for what decides nothing, another one for every value that decides a result."""

import pytest

from exlm_cli.config.base import Mark, identity_of, identity_values
from exlm_cli.config.sections import MaskingConfig
from tests.tiny import tiny_recipe
from tests.unit.finetune.synthetic import finetune_recipe

RESUMED = {Mark.INPUT, Mark.COMPUTING}


@pytest.mark.parametrize(
    "sections",
    [{"name": "other"}, {"device": "auto"}, {"train": {"validate_every_steps": 77, "keep_last": 9}},
     {"data": {"cache_dir": "elsewhere"}}]
)  # fmt: skip
def test_names_devices_and_records_are_no_part_of_it(sections):
    assert identity_of(tiny_recipe(**sections)) == identity_of(tiny_recipe())


@pytest.mark.parametrize("sections", [{"optim": {"lr": 2e-3}}, {"seed": 3}, {"masking": {"mask_ratio": 0.2}}])
def test_what_decides_the_weights_is_part_of_it(sections):
    for without in (set(), RESUMED):
        assert identity_of(tiny_recipe(**sections), without=without) != identity_of(tiny_recipe(), without=without)


def test_a_new_key_leaves_the_identity_of_older_recipes():
    """A section with one more key, at its default; any other value of it is another identity."""

    class LaterConfig(MaskingConfig):
        later: int = 0

    before, given = MaskingConfig(mask_ratio=0.3), {"mask_ratio": 0.3}
    assert identity_of(LaterConfig(**given)) == identity_of(before)
    assert identity_of(LaterConfig(**given, later=1)) != identity_of(before)


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"train": ["elsewhere.txt"]}}, {"data": {"valid": ["elsewhere.txt"]}},
        {"tokenizer": {"path": "t.json"}}, {"train": {"alignment_backend": "reference"}},
        {"train": {"microbatch_tokens": 128}}, {"train": {"num_threads": 1}},
        {"train": {"compile": True}},
    ],
)  # fmt: skip
def test_a_resumed_run_may_move_its_inputs_and_compute_in_another_way(sections):
    assert identity_of(tiny_recipe(**sections)) != identity_of(tiny_recipe())
    assert identity_of(tiny_recipe(**sections), without=RESUMED) == identity_of(tiny_recipe(), without=RESUMED)


def test_fine_tuning_leaves_out_the_files_of_its_task_and_nothing_that_is_computed():
    values = identity_values(finetune_recipe(), without={Mark.INPUT})
    assert values.keys() == {"seeds", "num_replicates", "aggregate", "init", "task", "model", "optim", "train", "grid"}
    assert {"name", "sequence_length", "split_seed", "max_rows"} <= values["task"].keys()
    assert not {"data_dir", "files", "split_file"} & values["task"].keys()
    assert {"num_threads", "compile", "microbatch_tokens", "validate_every_steps"} <= values["train"].keys()
    assert not {"keep_last", "checkpoint_every_steps", "log_every_steps"} & values["train"].keys()
