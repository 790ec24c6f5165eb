"""Hub names, and the Hub's answers as its client raises or returns them; no network is used."""

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from exlm_cli.data.rows.hub import HubSource, find_revision, iter_hub_records
from exlm_cli.data.rows.records import ColumnChoice, Record, Row, as_row
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder

SOURCE = HubSource("me/corpus", None, "train")


def test_names_have_an_owner_a_configuration_and_a_split():
    name = "wikimedia/wikipedia/20231101.en@validation"
    assert HubSource.parse(name) == HubSource("wikimedia/wikipedia", "20231101.en", "validation")
    assert HubSource.parse("bookcorpus") == HubSource("bookcorpus", None, "train")
    for wrong in ("", "a/b/c/d", "me/cor pus", "me/corpus@"):
        with pytest.raises(DataError, match=re.escape(f"`hub:{wrong}`")):
            HubSource.parse(wrong)


def _load(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> Mock:
    load = Mock(return_value=datasets.Dataset.from_list(rows).to_iterable_dataset())
    monkeypatch.setattr(datasets, "load_dataset", load)
    return load


def test_records_have_all_their_columns_or_the_one_that_is_read(monkeypatch):
    rows = [{"question1": "a", "label": 1}, {"question1": "b", "label": 0}]
    load = _load(monkeypatch, rows)
    name = "hub:me/pairs/qqp@validation"
    assert list(iter_hub_records(HubSource("me/pairs", "qqp", "validation", "abc123"))) == [
        Record(name, number, values, has_lines=False) for number, values in enumerate(rows, start=1)
    ]
    load.assert_called_once_with("me/pairs", "qqp", split="validation", revision="abc123", streaming=True)
    _load(monkeypatch, [{"title": "a", "text": " one "}, {"title": "b", "text": None}])
    one = [as_row(record) for record in iter_hub_records(SOURCE, only=ColumnChoice("text"))]
    assert one == [Row(str(SOURCE), 1, "one"), Row(str(SOURCE), 2, "", problem="is null", is_null=True)]


def test_columns_that_the_format_does_not_declare_are_read_off_the_first_row(monkeypatch):
    for rows in ([{"id": 1, "smiles": "CCO"}], []):
        undeclared = datasets.IterableDataset.from_generator(lambda rows=rows: iter(rows))
        monkeypatch.setattr(datasets, "load_dataset", Mock(return_value=undeclared))
        found = [record.values["smiles"] for record in iter_hub_records(SOURCE, only=ColumnChoice("smiles"))]
        assert found == [row["smiles"] for row in rows]


def test_a_folder_with_the_name_of_the_data_set_is_not_read_in_its_place(monkeypatch, tmp_path):
    (tmp_path / "me" / "pairs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"me/pairs is also a file or folder in the current directory$"):
        list(iter_hub_records(HubSource("me/pairs", None, "train")))


def _answer(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
    """Let the Hub name a revision, or raise an error, when it is asked for `me/corpus`."""
    known = Mock(side_effect=[answer] if isinstance(answer, Exception) else [SimpleNamespace(sha=answer)])
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda _, name: {"me/corpus": known}[name]())


def _network_error() -> Exception:
    """What the client raises where nothing answers: it descends from a base of its HTTP library."""
    return HfHubHTTPError.__bases__[0]("[Errno 111] Connection refused")


def test_the_revision_is_remembered_for_times_without_a_network(monkeypatch, tmp_path):
    _answer(monkeypatch, "abc123")
    assert find_revision(SOURCE, tmp_path, SilentProgress()) == "abc123"
    _answer(monkeypatch, _network_error())
    progress = Recorder()
    assert find_revision(SOURCE, tmp_path, progress) == "abc123"
    (said,) = progress.said
    assert "abc123" in said


def test_a_hub_that_does_not_answer_or_lacks_the_data_set_or_split_is_an_error(monkeypatch, tmp_path):
    wrong = ValueError("Bad split: x. Available splits: ['train']\nmore lines")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=wrong))
    with pytest.raises(DataError, match=r"Bad split: x. Available splits: \['train'\]$") as caught:
        list(iter_hub_records(SOURCE, hint="a hint"))
    assert caught.value.hint == "a hint"
    missing = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    offline = OfflineModeIsEnabled("offline mode is enabled")
    answers = ((_network_error(), "Connection refused"), (offline, "offline mode"), (missing, "no public data set"))
    for answer, words in answers:
        _answer(monkeypatch, answer)
        with pytest.raises(DataError, match=rf"^`hub:me/corpus@train`.*{words}") as caught:
            find_revision(SOURCE, tmp_path, SilentProgress())
        assert "`--set data.train=FILE`" in caught.value.hint
