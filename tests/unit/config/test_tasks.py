"""Task sections: each suite has its own keys, and keys that do not go together are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from exlm_cli.config.finetune import FinetuneRecipe, SharedTaskConfig
from exlm_cli.config.tasks import SUITES, check_task_name
from exlm_cli.errors import ConfigError


def section(**task: Any) -> Any:
    content = {"name": "tiny", "task": task, "optim": {"lr": 1e-3}}
    return FinetuneRecipe.model_validate(content).task


def finding(**task: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section(**task)
    return str(caught.value.errors()[0]["msg"])


def test_a_task_has_the_section_of_its_suite_and_is_written_and_read_back():
    for suite, own in SUITES.items():
        for name in own.tasks:
            task = section(name=name)
            assert (type(task), task.suite) == (own, suite)
            assert section(**task.model_dump(mode="json")) == task


@pytest.mark.parametrize(
    ("task", "suites"),
    [
        ({"name": "csv", "doc_stride": 9}, "squad"),
        ({"name": "glue/rte", "standardise": "parent"}, "moleculenet and csv"),
        ({"name": "moleculenet/bace", "files": {"valid": "a"}}, "glue and squad and csv"),
    ],
)
def test_a_key_of_another_suite_is_refused_and_its_suites_are_named(task, suites):
    assert finding(**task).endswith(f"` is for {suites}; {task['name']} does not use it")


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        ({"name": "csv", "split": "group"}, "`task.split: group` needs `task.group_column`"),
        ({"name": "csv", "time_column": "date"}, "`task.time_column` is read by `task.split: time`"),
        ({"name": "moleculenet/bace", "split": "time"}, "`task.split: time` is for csv"),
        ({"name": "moleculenet/bace", "split_file": "a.json"}, "`task.split_file` is read by `task.split: file`"),
        ({"name": "csv", "text_column": "a", "smiles_column": "b"}, "`task.smiles_column` is `b`"),
        ({"name": "csv", "text_column": ["a", "a"]}, "`task.text_column` names `a` twice"),
        ({"name": "csv", "standardise": "parent", "canonical_smiles": False}, "a parent has no SMILES as written"),
        ({"name": "csv", "split_column": "a", "split": "random"}, "`task.split_column`"),
        ({"name": "csv", "files": {"train": "b", "valid": "a"}, "split": "random"}, "`task.files.valid`"),
        ({"name": "csv", "files": {"train": "b", "test": "a"}}, "without `task.files.valid`"),
        ({"name": "csv", "files": {"valid": "a"}, "split_column": "b"}, "`task.split_column`"),
        ({"name": "squad/v2", "files": {"valid": "a"}}, "without `task.files.train`"),
        ({"name": "csv", "text_column": "a", "standardise": "parent"}, "`task.standardise: parent` is for molecules"),
        ({"name": "csv", "label_columns": ["a", "a"]}, "`task.label_columns` gives `a` twice"),
        ({"name": "csv", "positive_class": "a", "label_kind": "regression"}, "`task.label_kind: regression` has none"),
        ({"name": "csv", "positive_class": "a", "label_columns": ["a", "b"]}, "`task.label_columns` gives several"),
        ({"name": "glue/rte", "files": {"valid": "a"}}, "`task.files.train` is missing"),
        ({"name": "squad/v2", "files": {"train": "b", "valid": "a"}, "valid_articles": ["a"]}, "`task.valid_articles`"),
        ({"name": "squad/v2", "files": {"test": "a"}}, "`task.files.test` is for glue and csv"),
        ({}, "`task.name` is missing"),
        ({"name": 5}, "`task.name` is 5"),
        ({"name": "glu/rte"}, "did you mean `glue/rte`"),
    ],
)  # fmt: skip
def test_a_wrong_section_is_refused(task, keys):
    assert keys in finding(**task)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("glu/rte", "`glue/rte`"),
        ("glue/SST-2", "`glue/sst2`"),
        ("xyz/a", "`moleculenet/bace`"),
        ("csv/mine", "task.files.train=FILE"),
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest_one(given, hint):
    with pytest.raises(ConfigError) as caught:
        check_task_name(given)
    assert hint in caught.value.hint


def test_each_task_of_a_sweep_takes_the_shared_keys_that_its_suite_has():
    shared = SharedTaskConfig(name="glue/rte", doc_stride=64, label_columns=("a",), data_dir="d")
    assert section(**shared.of_task("squad/v2")) == section(name="squad/v2", doc_stride=64, data_dir="d")
    assert section(**shared.of_task("csv")) == section(name="csv", label_columns=("a",), data_dir="d")
    assert section(**shared.of_task("glue/rte")) == section(name="glue/rte", data_dir="d")
    shared.refuse_unused(["squad/v2", "csv"])
    with pytest.raises(ValueError, match=r"`finetune\.task\.label_columns` is for csv; squad/v2 does not use it"):
        shared.refuse_unused(["squad/v2"])
