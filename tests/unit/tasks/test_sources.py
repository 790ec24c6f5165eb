"""Files of a task are found by name, in the folder of the task, or on the Hub."""

from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.tasks import GlueTaskConfig
from exlm_cli.data.rows.hub import HubSource
from exlm_cli.errors import DataError
from exlm_cli.tasks.sources import existing_folder, find_file, given_file, hub_source


def config(**values: Any) -> GlueTaskConfig:
    return GlueTaskConfig(name="glue/rte", **values)


def test_files_given_by_name_start_in_the_data_folder():
    assert given_file(config(), "a.tsv") == Path("a.tsv")
    assert given_file(config(data_dir="/data"), "a.tsv") == Path("/data/a.tsv")
    assert given_file(config(data_dir="/data"), "/other/a.tsv") == Path("/other/a.tsv")


def test_without_a_folder_the_hub_is_read():
    for data_dir, source in {
        None: HubSource("me/glue", "rte", "train"),
        "hub:you/glue": HubSource("you/glue", "rte", "train"),
        "hub:you/glue/rte-v2": HubSource("you/glue", "rte-v2", "train"),
        "/data": None,
    }.items():
        assert hub_source(config(data_dir=data_dir), "me/glue", "rte", "train") == source


def test_a_folder_of_the_task_inside_the_data_folder_is_taken(tmp_path):
    assert existing_folder(config(data_dir=str(tmp_path)), ("RTE", "rte")) == tmp_path
    (tmp_path / "rte").mkdir()
    assert existing_folder(config(data_dir=str(tmp_path)), ("RTE", "rte")) == tmp_path / "rte"
    (tmp_path / "RTE").mkdir()
    assert existing_folder(config(data_dir=str(tmp_path)), ("RTE", "rte")) == tmp_path / "RTE"


def test_a_file_is_found_compressed_or_not_and_must_be_the_only_one(tmp_path):
    assert find_file(tmp_path, "train", (".tsv", ".jsonl")) is None
    (tmp_path / "train.jsonl.gz").touch()
    (tmp_path / "train.txt").touch()
    assert find_file(tmp_path, "train", (".tsv", ".jsonl")) == tmp_path / "train.jsonl.gz"
    (tmp_path / "train.tsv").touch()
    with pytest.raises(DataError, match=r"train\.jsonl\.gz and train\.tsv") as caught:
        find_file(tmp_path, "train", (".tsv", ".jsonl"))
    assert "keep one of them" in caught.value.hint
