"""Parameter counts against sums written out for a small model; model tests compare them with the real network."""

from typing import Any

import pytest

from exlm_cli.config.describe import count_parameters, tokens_per_step
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from tests.tiny import tiny_recipe

# width 16, ffn 32, 2 layers, vocabulary 300
EMBEDDING = 300 * 16
BLOCK = 2 * 16 + 4 * (16 * 16 + 16) + 2 * 16 + (16 * 32 + 32) + (32 * 16 + 16)
LM_HEAD = (16 * 16 + 16) + 2 * 16 + 300
ENCODER = EMBEDDING + 2 * BLOCK + 2 * 16 + LM_HEAD


@pytest.mark.parametrize(
    ("sections", "beyond_the_encoder"),
    [
        ({}, 2 * (16 * 16 + 16)),
        ({"objective": "mlm"}, 0),
        ({"model": {"alignment": "independent"}}, 0),
        ({"model": {"alignment": "sparse_dag"}}, 2 * (16 * 16 + 16)),
        ({"model": {"learned_positions": True}}, 2 * (16 * 16 + 16) + 64 * 16),
        ({"model": {"clone_embedding": "input"}}, 2 * (16 * 16 + 16) + 3 * 16),
        ({"model": {"transition": {"lane_bias": 2.0}}}, 2 * (16 * 16 + 16) + 2),
        ({"model": {"transition": {"heads": 2}}}, 2 * (16 * 16 + 16) + (16 * 2 + 2)),
        (
            {"model": {"transition": {"heads": 4, "position_features": True, "max_nodes": 50}}},
            50 * 16 + 2 * (32 * 16 + 16) + (32 * 4 + 4),
        ),
    ],
)
def test_parameters_are_the_sum_over_the_parts(sections: dict[str, Any], beyond_the_encoder: int) -> None:
    assert count_parameters(tiny_recipe(**sections)) == ENCODER + beyond_the_encoder


def test_another_vocabulary_changes_the_embedding_and_the_decoder_bias() -> None:
    recipe = tiny_recipe()
    assert count_parameters(recipe, 301) - count_parameters(recipe) == 16 + 1


@pytest.mark.parametrize(
    ("sections", "tokens"),
    [
        ({}, 8 * 16),
        ({"objective": "mlm", "masking": {"num_repeats": 3}}, 8 * (14 * 3 + 2)),
        ({"train": {"batch_sequences": None, "batch_tokens": 500}}, 500),
    ],
)
def test_tokens_of_a_step_count_repetitions_and_not_clones(sections: dict[str, Any], tokens: int) -> None:
    assert tokens_per_step(tiny_recipe(**sections)) == tokens


def test_the_gated_recipe_has_as_many_parameters_as_the_paper_says() -> None:
    recipe: PretrainRecipe = load_recipe("text-base-gated")
    assert count_parameters(recipe) == pytest.approx(128e6, rel=0.003)
