"""Sweep recipes: variants written by hand or generated from (k, p); errors are in `golden/`."""

import pytest

from exlm_cli.config.load import load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import ConfigError
from tests.unit.report.results import PAIRS, RATIOS

SWEEP, GRID = "quickstart-ablations", "quickstart-repeat-mlm"


def _load(name: str, *overrides: str) -> SweepRecipe:
    return load_recipe(name, overrides, kind=SweepRecipe)


def _error(name: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(name, *overrides)
    return caught.value


def test_a_variant_is_the_common_recipe_with_its_changes():
    variants = "variants={exlm: {}, slow: {optim.lr: 1e-4, masking.num_states_per_mask: 2}}"
    recipe = _load(SWEEP, variants, "seeds=[3, 9]", "only=[exlm, slow]")
    cells = recipe.plan()
    assert [cell.name for cell in cells] == ["exlm/seed-3", "slow/seed-3", "exlm/seed-9", "slow/seed-9"]
    expected = recipe.pretrain.model_dump() | {"name": f"{SWEEP}-slow", "purpose": f"Variant slow of {SWEEP}"}
    expected |= {"paper": recipe.paper, "seed": 9}
    expected["optim"]["lr"] = 1e-4
    expected["masking"]["num_states_per_mask"] = 2
    expected["train"]["num_threads"] = 1
    assert cells[3].pretrain.model_dump() == expected
    assert cells[3].changes == {"optim.lr": 1e-4, "masking.num_states_per_mask": 2}


def test_generated_variants_differ_in_k_p_and_the_room_for_k_copies_alone():
    recipe = _load(GRID, "cells=[[1, 0.3], [4, 0.7]]", "seeds=[3, 9]")
    cells = recipe.plan()
    names = ["k1-p0.3/seed-3", "k4-p0.7/seed-3", "k1-p0.3/seed-9", "k4-p0.7/seed-9"]
    assert [cell.name for cell in cells] == names
    first, second = cells[0].pretrain, cells[1].pretrain
    masking = first.masking.model_copy(update={"num_repeats": 4, "mask_ratio": 0.7})
    model = first.model.model_copy(update={"max_length": 4 * 64})
    named = {"name": second.name, "purpose": f"Variant k4-p0.7 of {GRID}", "paper": recipe.paper}
    assert second == first.model_copy(update={**named, "masking": masking, "model": model})
    assert cells[2].pretrain == first.model_copy(update={"seed": 9})
    assert cells[1].work == pytest.approx(cells[0].work * (62 * 4 + 2) / 64)


def test_generated_variants_that_corrupt_few_tokens_get_more_steps():
    changes = ["cells=[[1, 0.01], [1, 0.5], [2, 0.1]]", "pretrain.train.max_steps=10", "pretrain.optim.warmup_steps=5"]
    assert {cell.pretrain.train.max_steps for cell in _load(GRID, *changes).plan()} == {10}
    changes += ["pretrain.train.batch_sequences=20", "min_corrupted_tokens=1000"]
    # of 62 tokens a sequence, masked in all copies in a step: 12.4, 620 and 12.4
    assert [cell.pretrain.train.max_steps for cell in _load(GRID, *changes).plan()] == [81, 10, 81]
    changes += ["pretrain.train.batch_sequences=null", "pretrain.train.batch_tokens=1280"]
    # 20 sequences of 64 tokens fit, and 10.16 of 126
    assert [cell.pretrain.train.max_steps for cell in _load(GRID, *changes).plan()] == [81, 10, 159]


def test_the_papers_k_and_p_make_its_14_cells_and_its_grey_ones_and_p_alone_chooses_among_them():
    chosen, grey = _load("repeat-mlm").choose_cells((1, 2, 4, 8), RATIOS)
    assert set(chosen.cells) == set(PAIRS)
    # "less than 0.05%", which 2.25 % squared just misses
    assert {(k, p) for k, p in grey} == {(2, 0.0225), (4, 0.0225), (4, 0.15), (8, 0.0225), (8, 0.15), (8, 0.387)}
    assert max(p**k for k, p in grey) < 0.00051
    ones, left_out = _load("repeat-mlm").choose_cells(None, (0.0225,))
    assert (ones.cells, left_out) == (((1, 0.0225),), [])


def test_values_that_no_task_accepts_are_refused_also_while_there_are_no_tasks():
    message = _error(GRID, "tasks=[]", "finetune.task.files.valid=dev.tsv").message
    assert "`task.files.train` is missing: `train` and `valid` are both needed" in message
