"""The fine-tuning recipe: values that do not go together, and warm-up by ratio."""

from typing import Any

import pytest
from pydantic import ValidationError

from exlm_cli.config.finetune import FinetuneRecipe, TaskConfig
from exlm_cli.config.sections import OptimConfig


def recipe(**sections: Any) -> FinetuneRecipe:
    content = {"name": "tiny", "task": {"name": "csv"}, "optim": {"lr": 1e-3}} | sections
    return FinetuneRecipe.model_validate(content)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"seeds": [1, 2, 1]}, "`seeds` [1, 2, 1] names a seed twice"),
        ({"task": {"name": "csv", "split": "file"}}, "`task.split: file` needs `task.split_file`"),
        ({"task": {"name": "csv", "split_file": "a.json"}},
         "`task.split_file` is read by `task.split: file`, but `task.split` is `scaffold`"),
        ({"task": {"name": "csv", "text_column": "a", "split": "scaffold-balanced"}},
         "`task.split: scaffold-balanced` is for molecules; the task has text"),
        ({"task": {"name": "csv", "split_column": "a", "split": "random"}},
         "`task.split: random` does not go with `task.split_column`, which splits the rows"),
        ({"task": {"name": "csv", "files": {"valid": "a"}, "split": "random"}},
         "`task.split: random` does not go with `task.files.valid`, which splits the rows"),
        ({"task": {"name": "csv", "files": {"train": ""}}}, "`task.files.train` is an empty text; give a file or null"),
        ({"task": {"name": "glue/rte", "canonical_smiles": True}},
         "`task.canonical_smiles` is for molecules; the task has text"),
        ({"task": {"name": "csv", "text_column": "a", "canonical_smiles": True}},
         "`task.canonical_smiles` is for molecules; the task has text"),
        ({"optim": {"lr": 1e-3, "transition_lr_scale": 0.5}},
         "`optim.transition_lr_scale` is pre-training's: fine-tuning has no transition head"),
        ({"optim": {"lr": 1e-3, "transition_start_ratio": 0.5}},
         "`optim.transition_start_ratio` is pre-training's: fine-tuning has no transition head"),
        ({"optim": {"lr": 1e-3, "warmup_steps": 5}, "train": {"max_steps": 4}},
         "`optim.warmup_steps` 5 is more than `train.max_steps` 4"),
        ({"optim": {"lr": 1e-3, "warmup_steps": 5, "warmup_ratio": 0.1}},
         "give `optim.warmup_steps` or `optim.warmup_ratio`, not both"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        recipe(**sections)
    (finding,) = caught.value.errors()
    assert finding["msg"] == f"Value error, {message}"


USED = {
    "moleculenet/bace": {
        "split": "random", "class_weights": "balanced", "smiles_column": "a", "canonical_smiles": True,
    },
    "csv": {
        "split": "random", "class_weights": "balanced", "smiles_column": "a", "canonical_smiles": True,
        "split_column": "a", "text_column": "a", "label_columns": ["a"], "label_kind": "classes",
        "files": {"valid": "a", "test": "b"},
    },
    "glue/rte": {"files": {"valid": "a", "test": "b"}},
    "squad/v2": {
        "files": {"valid": "a"}, "valid_articles": ["a"], "doc_stride": 9, "max_query_tokens": 9,
        "max_answer_tokens": 9,
    },
}  # fmt: skip
"""Values that are no defaults, of the keys that a task uses and another one does not."""
COMMON = {
    "data_dir": "a", "files": {"train": "a"}, "sequence_length": 9, "split_seed": 9, "on_invalid": "error",
    "max_rows": 9,
}  # fmt: skip


def test_every_key_of_a_task_is_known_to_be_used_by_all_or_by_some() -> None:
    keys = {"split_file", "name", *COMMON, *(key for used in USED.values() for key in used)}
    assert keys == set(TaskConfig.model_fields)


@pytest.mark.parametrize("task", USED)
def test_a_key_that_a_task_does_not_use_is_refused(task: str) -> None:
    for key, value in {**COMMON, **USED[task]}.items():
        recipe(task={"name": task, key: value})
    for other, used in USED.items():
        for key, value in used.items():
            if key not in USED[task] and key != "canonical_smiles":
                with pytest.raises(
                    ValidationError, match=rf"`task\.{key}(\.valid)?` is for .*; {task} does not use it"
                ):
                    recipe(task={"name": task, key: value})
            assert other != task or key in USED[task]


def test_a_key_of_another_suite_is_told_with_its_suites() -> None:
    with pytest.raises(ValidationError) as caught:
        recipe(task={"name": "glue/rte", "class_weights": "balanced"})
    assert caught.value.errors()[0]["msg"] == (
        "Value error, `task.class_weights` is for moleculenet and csv; glue/rte does not use it"
    )


@pytest.mark.parametrize("name", ["", "moleculenet/", "GLUE/rte", "a/b/c", "../x", "csv file"])
def test_a_task_name_is_a_suite_and_a_name(name: str) -> None:
    with pytest.raises(ValidationError):
        recipe(task={"name": name})


@pytest.mark.parametrize(("name", "suite"), [("csv", "csv"), ("glue/rte", "glue"), ("squad/v2", "squad")])
def test_the_suite_is_before_the_slash(name: str, suite: str) -> None:
    assert recipe(task={"name": name}).task.suite == suite


@pytest.mark.parametrize(
    ("ratio", "total", "steps"), [(0.06, 100, 6), (0.06, 101, 7), (0.0, 100, 0), (0.06, 1, 1), (None, 100, 9)]
)
def test_a_ratio_of_warm_up_is_rounded_up_to_steps(ratio: float | None, total: int, steps: int) -> None:
    optim = OptimConfig(lr=1e-3, warmup_steps=9 if ratio is None else 0, warmup_ratio=ratio)
    assert optim.resolve_warmup_steps(total) == steps


def test_runs_begun_before_a_key_was_there_keep_their_identity() -> None:
    """Else a new version would refuse to resume them, and a grid to add seeds."""
    optim = OptimConfig(lr=1e-3)
    assert set(optim.as_identity()) == {
        "lr", "schedule", "warmup_steps", "power", "end_lr", "betas", "eps", "transition_lr_scale", "weight_decay",
        "clip_norm",
    }  # fmt: skip
    for later in ({"warmup_ratio": 0.0}, {"transition_start_ratio": 0.4}):
        assert OptimConfig(lr=1e-3, **later).as_identity() == optim.as_identity() | later
