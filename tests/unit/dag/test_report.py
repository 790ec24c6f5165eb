"""The files of an inspection: all of them, or none."""

import errno
import os
from dataclasses import replace
from unittest.mock import Mock

import pytest

from exlm_cli.dag import FORMATS
from exlm_cli.dag.report import render_report, write_report
from exlm_cli.errors import CheckpointError
from tests.unit.dag.inspections import case_files, case_study


def test_only_what_is_wanted_is_written(tmp_path):
    folder = tmp_path / "a" / "b"
    assert write_report(case_study(), folder, ["json", "svg"]) == [
        folder / "dag_graph.svg", folder / "dag_heatmap.svg", folder / "dag.json",
    ]  # fmt: skip
    assert {path.name: path.read_bytes() for path in folder.iterdir()}.items() <= case_files().items()
    assert len(list(folder.iterdir())) == 3
    assert write_report(case_study(), folder, []) == []


def test_a_model_without_transitions_has_no_pictures():
    inspection = replace(case_study(), dag=replace(case_study().dag, has_transitions=False))
    assert list(render_report(inspection, FORMATS)) == ["dag.html", "dag.json"]


def test_a_failure_leaves_no_new_folder(tmp_path, monkeypatch):
    full = [None, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(CheckpointError, match=r"No space left on device$"):
        write_report(case_study(), tmp_path / "new", ["html", "json"])
    assert list(tmp_path.iterdir()) == []
