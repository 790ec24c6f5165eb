"""Values that are fine alone and not together: every check across sections, the keys it names, and its edge."""

from typing import Any

import pytest
from pydantic import ValidationError

from exlm_cli.config.pretrain import PretrainRecipe
from tests.tiny import CHAIN, tiny_recipe


def refusal_of(sections: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        tiny_recipe(**sections)
    (finding,) = caught.value.errors()
    return finding["msg"].removeprefix("Value error, ")


# the tiny recipe: width 16, 2 heads, 16 tokens, p 0.3, k 3, at most 64 positions, 256 at once, 6 steps of 8 sequences
MLM = {"objective": "mlm"}
NUM_MASKS = 5  # floor(0.3 * 14 + u) is 4 or 5
LONGEST = 16 + 2 * NUM_MASKS


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"model": {"width": 12}}, "model.rope model.width model.num_heads"),
        ({"model": {"transition": {"rope": "nodes", "heads": 16}}},
         "model.width model.transition.heads model.transition.rope"),
        ({"model": {"transition": {"heads": 3}}}, "model.transition.heads"),
        ({"model": {"rope": "none"}}, "model.rope model.learned_positions"),
        ({**MLM, "masking": {"keep_ratio": 0.5, "random_ratio": 0.5}}, "masking.keep_ratio masking.random_ratio"),
        ({"masking": {"keep_ratio": 0.1}}, "masking.keep_ratio objective"),
        ({"masking": {"random_ratio": 0.1}}, "masking.random_ratio objective"),
        ({"masking": {"num_repeats": 2}}, "masking.num_repeats objective"),
        ({"masking": {"mask_ratio": [0, 0.3], "scheme": "bernoulli"}}, "masking.mask_ratio masking.scheme"),
        ({"masking": {"place": "spans", "scheme": "bernoulli"}}, "masking.place masking.scheme"),
        ({**MLM, "masking": {"place": "mixed", "num_repeats": 2}}, "masking.place masking.num_repeats"),
        ({"model": {"max_length": LONGEST - 1}, "masking": {"mask_ratio": [0, 0.36]}},
         "model.max_length data.sequence_length num_states_per_mask"),
        ({"model": {"alignment": "chain"}}, "model.alignment model.rope"),
        ({"model": CHAIN | {"max_length": 15}}, "model.max_length data.sequence_length num_states_per_mask"),
        ({**MLM, "masking": {"num_repeats": 5}}, "model.max_length masking.num_repeats"),
        ({"model": {"transition": {"position_features": True, "max_nodes": 3 * NUM_MASKS + 1}}},
         "model.transition.max_nodes"),
        ({"data": {"num_spellings": 2}}, "data.num_spellings data.kind"),
        ({"data": {"kind": "smiles", "canonical_smiles": False, "num_spellings": 2}},
         "data.num_spellings data.canonical_smiles"),
        ({"train": {"validate_at": [1, 0.9]}, "model": {"max_length": 40}}, "train.validate_at model.max_length"),
        ({"model": {"transition": {"position_features": True, "max_nodes": 20}}, "train": {"validate_at": [7]}},
         "train.validate_at model.transition.max_nodes"),
        ({"train": {"batch_sequences": None}}, "train.batch_sequences train.batch_tokens"),
        ({"train": {"max_steps": None}}, "train.max_steps train.max_epochs"),
        ({"train": {"batch_sequences": None, "batch_tokens": 15}}, "train.batch_tokens"),
        ({"train": {"microbatch_tokens": LONGEST - 1}}, "train.microbatch_tokens"),
        ({"model": CHAIN, "train": {"microbatch_tokens": 15}}, "train.microbatch_tokens"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together_are_refused_by_their_keys(sections, keys):
    said = refusal_of(sections)
    assert all(f"`{key}" in said for key in keys.split()), said


def test_an_mlm_expands_nothing():
    content = tiny_recipe(**MLM).model_dump()
    content["masking"]["num_states_per_mask"] = 2
    with pytest.raises(ValidationError, match=r"`masking.num_states_per_mask`"):
        PretrainRecipe.model_validate(content)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"max_length": LONGEST}},
        {"model": {"transition": {"position_features": True, "max_nodes": 3 * NUM_MASKS + 2}}},
        {"model": {"transition": {"max_nodes": 3}}},  # not asked for, so not needed
        {"model": CHAIN | {"transition": {"position_features": True, "max_nodes": 3}}},  # no such head
        {"model": {"rope": "none", "learned_positions": True, "width": 10}},
        {"model": {"rope": "none", "learned_positions": True, "transition": {"rope": "nodes"}}},
        {"model": {"transition": {"rope": "nodes", "heads": 8}}},
        {**MLM, "model": {"transition": {"rope": "nodes", "heads": 16}}},  # no such head
        {"model": CHAIN | {"max_length": 16}, "train": {"microbatch_tokens": 16}},
        {"data": {"kind": "smiles", "train": ["bundled:molecules"], "num_spellings": 2}},
        {"train": {"max_steps": None, "max_epochs": 1}, "optim": {"warmup_steps": 7}},
        {"train": {"batch_sequences": None, "batch_tokens": 16}},
        {"train": {"microbatch_tokens": LONGEST}},
        {**MLM, "masking": {"mask_ratio": [0, 0.3], "num_repeats": 2}},
        {"train": {"validate_at": [1, 9999, 0.9]}, "model": {"max_length": 44}},  # 16 + 2 * 14
        {"model": {"max_length": LONGEST}, "masking": {"mask_ratio": [0, 0.36], "place": "mixed"}},
    ],
)
def test_what_just_fits_is_accepted(sections):
    tiny_recipe(**sections)


@pytest.mark.parametrize(
    ("sections", "num_masks"),
    [
        ({}, NUM_MASKS),
        ({"masking": {"mask_ratio": 0.001}}, 1),
        ({"masking": {"mask_ratio": [0, 0.5]}}, 7),
        ({"masking": {"mask_ratio": [0.01, 0.02]}}, 1),
        ({"masking": {"scheme": "bernoulli"}}, 14),
        ({**MLM, "masking": {"num_repeats": 4, "scheme": "bernoulli"}}, 56),
    ],
)
def test_the_max_masks_of_a_sequence_follow_the_scheme(sections, num_masks):
    assert tiny_recipe(**sections).max_masks == num_masks
