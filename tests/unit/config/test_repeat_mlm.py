"""Grids of pre-training runs: their cells, sections that extend a recipe, and each mistake in one line."""

from pathlib import Path

import pytest

from exlm_cli.config.load import load_recipe
from exlm_cli.config.repeat_mlm import PAPER_CELLS, RepeatMlmRecipe, choose_cells
from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.errors import ConfigError


def _load(name: str, *overrides: str) -> RepeatMlmRecipe:
    return load_recipe(name, overrides, kind=RepeatMlmRecipe)


def _error(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load("quickstart-repeat-mlm", *overrides)
    assert "\n" not in caught.value.message
    return caught.value


def test_cells_differ_in_k_p_and_the_room_for_k_copies_alone() -> None:
    recipe = _load("quickstart-repeat-mlm", "cells=[[1, 0.3], [4, 0.7]]", "seeds=[3, 9]")
    plans = recipe.plan()
    assert [(plan.label, plan.seed, plan.row, plan.column) for plan in plans] == [
        ("k1-p0.3", 3, "k = 1", "30%"), ("k4-p0.7", 3, "k = 4", "70%"), ("k1-p0.3", 9, "k = 1", "30%"),
        ("k4-p0.7", 9, "k = 4", "70%"),
    ]  # fmt: skip
    first, second = plans[0].pretrain, plans[1].pretrain
    assert (second.masking.num_repeats, second.masking.mask_ratio, second.model.max_length) == (4, 0.7, 4 * 64)
    masking = first.masking.model_copy(update={"num_repeats": 4, "mask_ratio": 0.7})
    model = first.model.model_copy(update={"max_length": 256})
    assert second == first.model_copy(update={"name": second.name, "masking": masking, "model": model})
    assert plans[2].pretrain == first.model_copy(update={"seed": 9})
    assert {plan.folder for plan in plans} == {
        "k1-p0.3/seed-3", "k4-p0.7/seed-3", "k1-p0.3/seed-9", "k4-p0.7/seed-9"
    }  # fmt: skip
    assert plans[1].work == pytest.approx(plans[0].work * (62 * 4 + 2) / 64)


def test_cells_that_corrupt_few_tokens_get_more_steps() -> None:
    changes = ["cells=[[1, 0.01], [1, 0.5], [2, 0.1]]", "pretrain.train.max_steps=10", "pretrain.optim.warmup_steps=5"]
    assert {plan.pretrain.train.max_steps for plan in _load("quickstart-repeat-mlm", *changes).plan()} == {10}
    changes += ["pretrain.train.batch_sequences=20", "least_corrupted_tokens=1000"]
    # of 62 tokens a sequence, masked in all copies in a step: 12.4, 620 and 12.4
    steps = [plan.pretrain.train.max_steps for plan in _load("quickstart-repeat-mlm", *changes).plan()]
    assert steps == [81, 10, 81]
    changes += ["pretrain.train.batch_sequences=null", "pretrain.train.batch_tokens=1280"]
    # 20 sequences of 64 tokens fit, and 10.16 of 126
    steps = [plan.pretrain.train.max_steps for plan in _load("quickstart-repeat-mlm", *changes).plan()]
    assert steps == [81, 10, 159]


def test_every_process_has_one_thread_unless_the_recipe_says_otherwise() -> None:
    assert _load("quickstart-repeat-mlm").plan()[0].pretrain.train.num_threads == 1
    assert _load("quickstart-repeat-mlm", "pretrain.train.num_threads=3").plan()[0].pretrain.train.num_threads == 3


def test_tasks_are_fine_tuned_as_the_common_section_says() -> None:
    plan = _load("quickstart-repeat-mlm", "tasks=[glue/rte, glue/qnli]", "finetune.optim.lr=1e-4").plan()[0]
    assert [(recipe.name, recipe.task.name, recipe.optim.lr) for recipe in plan.finetune] == [
        ("glue-rte", "glue/rte", 1e-4),
        ("glue-qnli", "glue/qnli", 1e-4),
    ]


def test_a_key_of_a_task_is_checked_against_the_tasks_of_the_grid_and_given_to_those_that_use_it() -> None:
    csv = ["tasks=[csv]", "finetune.task.files.train=my.csv", "finetune.task.text_column=words"]
    (own,) = _load("quickstart-repeat-mlm", *csv, "finetune.task.label_columns=[good]").plan()[0].finetune
    assert (own.task.name, own.task.files.train) == ("csv", "my.csv")
    assert (own.task.text_column, own.task.label_columns) == ("words", ("good",))
    recipe = _load("quickstart-repeat-mlm", "tasks=[glue/rte, squad/v2]", "finetune.task.doc_stride=64")
    glue, squad = (task.task for task in recipe.plan()[0].finetune)
    assert squad == SquadTaskConfig(name="squad/v2", doc_stride=64)
    assert not hasattr(glue, "doc_stride")
    assert RepeatMlmRecipe.model_validate(recipe.model_dump()) == recipe


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("tasks=[glue/rte, glue/mrpc]", "finetune.task.doc_stride=64"),
            "`finetune.task.doc_stride` is for squad; glue/rte and glue/mrpc do not use it",
        ),
        (
            ("tasks=[]", "finetune.task.label_columns=[good]"),
            "`finetune.task.label_columns` is for csv; glue/mnli does not use it",
        ),
        (
            ("tasks=[glue/rte, csv]", "finetune.task.files.train=my.csv"),
            "`finetune.task.files` names the files of one task; there are 2: glue/rte, csv",
        ),
        (
            ("tasks=[moleculenet/bace]", "finetune.task.split=file"),
            "`finetune` on moleculenet/bace: `task.split: file` needs `task.split_file`",
        ),
    ],
)
def test_a_key_that_no_task_of_the_grid_can_follow_is_refused(overrides: tuple[str, ...], said: str) -> None:
    assert _error(*overrides).message.endswith(f"`: {said}")


def test_sequences_too_long_for_a_microbatch_get_a_larger_one() -> None:
    plans = _load("quickstart-repeat-mlm", "cells=[[1, 0.3], [8, 0.8]]", "pretrain.train.microbatch_tokens=100").plan()
    assert [plan.pretrain.train.microbatch_tokens for plan in plans] == [100, 62 * 8 + 2]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cells=[[1, 0.3], [1, 0.3]]", "`cells` names a cell twice"),
        (
            "cells=[[1, 0.3], [1, 0.3000001]]",
            "`cells` has two whose folder would be k1-p0.3: six digits of p tell cells apart",
        ),
        ("seeds=[1, 1]", "`seeds` [1, 1] names one of them twice"),
        ("tasks=[glue/rte, glue/rte]", "`tasks` ['glue/rte', 'glue/rte'] names one of them twice"),
        ("pretrain.objective=exlm", "`pretrain.objective` must be mlm: Repeated MLM has no expanded states"),
        (
            "pretrain.masking.scheme=fixed",
            "`pretrain.masking.scheme` must be bernoulli: p^k needs every copy masked on its own (App. C)",
        ),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(override: str, said: str) -> None:
    path = "recipes/repeat_mlm/quickstart-repeat-mlm.yaml"
    overrides = ["cells=[[1, 0.3]]", override] if "objective" in override else [override]
    assert _error(*overrides).message == f"{path} with `--set {override}`: {said}"


def test_more_steps_than_no_given_number_are_refused() -> None:
    message = _error("least_corrupted_tokens=9", "pretrain.train.max_steps=null", "pretrain.train.max_epochs=1").message
    assert message.endswith(": `least_corrupted_tokens` raises `pretrain.train.max_steps`, which is not given")


def test_a_cell_that_its_recipe_cannot_take_is_named() -> None:
    message = _error(
        "cells=[[2, 0.3]]", "pretrain.train.batch_sequences=null", "pretrain.train.batch_tokens=100"
    ).message
    assert message.endswith(": cell k2-p0.3: `train.batch_tokens` 100 does not hold one sequence of 126")


@pytest.mark.parametrize("cells", ["[[0, 0.3]]", "[[1, 1.0]]", "[[1]]", "[]"])
def test_a_cell_out_of_bounds_is_refused(cells: str) -> None:
    assert f"`cells` is {cells}" in _error(f"cells={cells}").message


def test_a_misspelt_key_inside_a_section_is_told_with_the_nearest() -> None:
    error = _error("pretrain.optim.lrr=1e-3")
    assert error.message == "`--set pretrain.optim.lrr=1e-3`: unknown key `pretrain.optim.lrr`"
    assert error.hint == "did you mean `pretrain.optim.lr`?"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("seed=3", "`pretrain.seed` is set in every cell; use `--seeds`"),
        (
            "masking.mask_ratio=0.3",
            "`pretrain.masking.mask_ratio` is set in every cell; use `--mask-ratios`, or `cells`",
        ),
        ("masking.scheme=bernoulli", "did you mean `pretrain.masking.scheme`?"),
    ],
)
def test_no_hint_leads_to_a_key_that_is_refused(override: str, hint: str) -> None:
    error = _error(override)
    assert error.message == f"`--set {override}`: unknown key `{override.partition('=')[0]}`"
    assert error.hint == hint


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("pretrain.seed=3", "pretrain.seed", "use `--seeds`"),
        ("pretrain={device: cuda}", "pretrain.device", "use `--device`"),
        ("pretrain.masking.mask_ratio=0.3", "pretrain.masking.mask_ratio", "use `--mask-ratios`, or `cells`"),
        ("pretrain.masking.num_repeats=2", "pretrain.masking.num_repeats", "use `--num-repeats`, or `cells`"),
        ("finetune.task.name=glue/rte", "finetune.task.name", "use `--task`"),
        (
            "finetune.grid={optim.lr: [1e-5, 2e-5]}",
            "finetune.grid",
            "use one value, like `--set finetune.optim.lr=1e-5`: cells are fine-tuned without a search",
        ),
    ],
)
def test_a_key_that_the_grid_sets_itself_is_refused(override: str, key: str, hint: str) -> None:
    error = _error(override)
    assert error.message == f"`--set {override}`: `exlm repeat-mlm` sets `{key}` itself, in every cell"
    assert error.hint == hint


def test_a_section_extends_a_recipe_and_replaces_what_it_inherits(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: quickstart-repeat-mlm\npretrain:\n  extends: text-small-mlm\n  masking: {scheme: bernoulli}\n"
        "  data: {train: [my.txt]}\n"
    )
    recipe = _load(str(path))
    base = load_recipe("text-small-mlm", ["masking.scheme=bernoulli", "data.train=my.txt"])
    assert recipe.pretrain == base
    assert recipe.cells == _load("quickstart-repeat-mlm").cells


def test_a_section_that_extends_nothing_changes_what_it_inherits(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart-repeat-mlm\npretrain:\n  optim: {lr: 0.25}\n")
    inherited = _load("quickstart-repeat-mlm").pretrain
    optim = inherited.optim.model_copy(update={"lr": 0.25})
    assert _load(str(path)).pretrain == inherited.model_copy(update={"optim": optim})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pretrain: {extends: nothing-like-it}", ": `extends`: unknown recipe `nothing-like-it`"),
        (
            "pretrain: {extends: moleculenet-bace}",
            "`moleculenet-bace` is a recipe of `exlm finetune`, not of `exlm pre",
        ),
        ("pretrain: {extends: 3}", ": `pretrain.extends` is 3; accepted: the name of a recipe, or a file beside this "),
    ],
)
def test_a_section_that_extends_what_is_not_there_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: quickstart-repeat-mlm\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        _load(str(path))
    assert said in caught.value.message


def test_all_combinations_of_the_papers_k_and_p_are_its_14_cells_and_its_grey_ones() -> None:
    cells, grey = choose_cells((), (1, 2, 4, 8), (0.0225, 0.15, 0.387, 0.622, 0.789))
    assert set(cells) == set(PAPER_CELLS)
    # "less than 0.05%", which 2.25 % squared just misses
    assert {(k, p) for k, p in grey} == {(2, 0.0225), (4, 0.0225), (4, 0.15), (8, 0.0225), (8, 0.15), (8, 0.387)}
    assert max(p**k for k, p in grey) < 0.00051


def test_k_or_p_alone_choose_among_the_cells_of_the_recipe() -> None:
    assert choose_cells(PAPER_CELLS, (8,), None) == (((8, 0.622), (8, 0.789)), ())
    assert choose_cells(PAPER_CELLS, None, (0.0225,)) == (((1, 0.0225),), ())
    assert choose_cells(PAPER_CELLS, None, None) == (PAPER_CELLS, ())


def test_a_recipe_together_with_an_earlier_one_has_the_cells_and_seeds_of_both() -> None:
    earlier = _load("quickstart-repeat-mlm", "cells=[[1, 0.3], [4, 0.7]]", "seeds=[3, 9]")
    later = _load("quickstart-repeat-mlm", "cells=[[4, 0.7], [2, 0.5]]", "seeds=[9]", "pretrain.optim.lr=0.25")
    both = later.together_with(earlier)
    assert both == later.model_copy(update={"cells": ((1, 0.3), (4, 0.7), (2, 0.5)), "seeds": (3, 9)})
    assert later.together_with(later) == later


def test_a_recipe_together_with_an_earlier_one_has_the_tasks_of_both() -> None:
    earlier = _load("quickstart-repeat-mlm", "tasks=[glue/rte, glue/qnli]")
    later = _load("quickstart-repeat-mlm", "tasks=[glue/sst2, glue/rte]")
    assert later.together_with(earlier).tasks == ("glue/rte", "glue/qnli", "glue/sst2")
    assert _load("quickstart-repeat-mlm", "tasks=[]").together_with(earlier).tasks == earlier.tasks


def test_an_earlier_cell_that_does_not_go_with_the_recipe_is_told() -> None:
    earlier = _load("quickstart-repeat-mlm", "cells=[[1, 0.3], [4, 0.7]]", "pretrain.model.max_length=64")
    pretrain = earlier.pretrain.model_copy(update={"objective": "exlm"})
    with pytest.raises(ConfigError, match=r"^the cells that this run has already do not go with the changed recipe: "):
        earlier.model_copy(update={"pretrain": pretrain}).together_with(earlier)
