"""Both public column layouts load alike; rows left out, kept, repeated or unlike Table 9 are reported by line."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.config.tasks import MoleculeNetTaskConfig
from exlm_cli.data.download import RemoteFile
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks import moleculenet
from exlm_cli.tasks.moleculenet import MOLECULENET_SETS, load_moleculenet
from exlm_cli.tasks.rows.task import RowTask

# four rings that carry four chains each, for training, and four rings of their own
MOLECULES = [f"C1{'C' * ring}C1{'C' * chain}" for ring in range(1, 5) for chain in range(4)]
MOLECULES += [f"C1{'C' * ring}C1" for ring in range(5, 9)]


def csv_of(header: str, rows: list[str]) -> bytes:
    return "\n".join([header, *rows, ""]).encode()


BACE = csv_of("smiles,Class", [f"{m},{i % 2}" for i, m in enumerate(MOLECULES)])


def load(folder: Path, name: str = "bace", **options: Any) -> RowTask:
    return load_moleculenet(
        MoleculeNetTaskConfig(name=f"moleculenet/{name}", data_dir=str(folder), **options), SilentProgress()
    )


def test_both_public_layouts_of_a_set_are_read(tmp_path):
    rows = [f"{m},BACE_{i},{i % 2},Train,{i / 10}" for i, m in enumerate(MOLECULES)]
    (tmp_path / "bace.csv").write_bytes(csv_of("mol,CID,Class,Model,pIC50", rows))
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "bace.csv.gz").write_bytes(gzip.compress(BACE.replace(b"smiles", b"SMILES")))
    task, theirs = load(ours, smiles_column="SMILES"), load(tmp_path)
    assert (task.loss, task.output_names, task.split_name) == ("binary", ("Class",), "scaffold")
    assert task.split_sizes == {"train": 16, "valid": 2, "test": 2}
    assert task.examples["train"].texts[0] == (MOLECULES[task.split_indices["train"][0]],)
    assert theirs.examples["train"].texts == task.examples["train"].texts
    assert np.array_equal(theirs.examples["valid"].targets, task.examples["valid"].targets)


def test_a_set_of_many_labels_takes_all_other_columns(tmp_path):
    labels = [f"MUV-{i}" for i in range(17)]
    rows = [",".join("" if j else str(i % 2) for j in range(17)) + f",CID{i},{m}" for i, m in enumerate(MOLECULES)]
    (tmp_path / "moleculenet").mkdir()
    (tmp_path / "moleculenet" / "muv.csv").write_bytes(csv_of(",".join([*labels, "mol_id", "structure"]), rows))
    task = load(tmp_path, "muv", smiles_column="structure")
    assert task.output_names == tuple(labels)
    is_known = ~np.isnan(task.examples["train"].targets)
    assert is_known.all(axis=0).tolist() == is_known.any(axis=0).tolist() == [True] + [False] * 16


def test_rows_that_are_left_out_or_kept_are_told_by_line(tmp_path):
    rows = [f"{m},{i % 2}" for i, m in enumerate(MOLECULES)]
    rows[3:3] = ["C1CC,0", "CC(=O)O[AlH3](O)O,0", "C1CC,0", f"{MOLECULES[0]},0"]
    (tmp_path / "bace.csv").write_bytes(csv_of("smiles,Class", rows))
    task = load(tmp_path)
    lines = [re.findall(r"\bline (\d+)", note) for note in task.notes[:3]]
    assert lines == [["5", "7"], ["6"], ["8"]]
    assert task.notes[3].startswith("16/2/3 molecules; Table 9 has 1,210/151/151")
    used = np.concatenate(list(task.split_indices.values()))
    assert sorted(used.tolist()) == [0, 1, 2, 4, *range(7, 24)]
    for limit in ("max_rows", "max_valid_rows"):
        assert not any("Table 9" in note for note in load(tmp_path, **{limit: 1}).notes)
    assert [(row.row, row.text) for row in task.skipped] == [("5", "C1CC"), ("7", "C1CC"), ("8", MOLECULES[0])]


def test_a_split_file_is_followed(tmp_path):
    (tmp_path / "bace.csv").write_bytes(BACE.replace(f"{MOLECULES[19]},1".encode(), b"C1CC,1"))
    split = tmp_path / "split.json"
    split.write_text('{"train": [0, 1, 2], "valid": [4, 5], "test": [19, 6]}')
    task = load(tmp_path, split="file", split_file=str(split))
    indices = {name: rows.tolist() for name, rows in task.split_indices.items()}
    assert (task.split_name, indices) == ("file", {"train": [0, 1, 2], "valid": [4, 5], "test": [6]})
    assert {"1 row of split.json cannot be used", "13 rows in no split of split.json"} <= set(task.notes)


def test_without_a_folder_the_file_is_fetched(tmp_path, monkeypatch):
    (tmp_path / "fetched.csv").write_bytes(BACE)
    asked: list[Any] = []

    def fetch(remote: RemoteFile, folder: str, progress: Any, hint: str) -> Path:
        asked.extend((remote, folder))
        return tmp_path / "fetched.csv"

    monkeypatch.setattr(moleculenet, "fetch_once", fetch)
    load_moleculenet(MoleculeNetTaskConfig(name="moleculenet/bace"), SilentProgress())
    remote = MOLECULENET_SETS["bace"].remote
    assert asked == [remote, "moleculenet"]
    # fetched elsewhere, it is found under its own name, as the hint of a failed download says
    (tmp_path / remote.name).touch()
    given = MoleculeNetTaskConfig(name="moleculenet/bace", data_dir=str(tmp_path))
    assert moleculenet.find_set_file(given, SilentProgress()) == tmp_path / remote.name


def test_sets_have_the_sizes_of_table_9_and_are_pinned():
    # Table 9 of the paper, typed from it, and the number of labels
    printed = {
        "bace": (1210, 151, 151, 1), "bbbp": (1631, 204, 204, 1), "clintox": (1182, 148, 148, 2),
        "tox21": (6264, 783, 783, 12), "toxcast": (6860, 858, 858, 617), "sider": (1141, 143, 143, 27),
        "muv": (74469, 9309, 9309, 17),
    }  # fmt: skip
    assert {name: (*known.table_9, known.num_labels) for name, known in MOLECULENET_SETS.items()} == printed
    for known in MOLECULENET_SETS.values():
        assert re.search(r"^https://.*/[0-9a-f]{40}/", known.remote.url)
        assert len(bytes.fromhex(known.remote.sha256)) == 32


def test_a_file_that_cannot_be_used_is_refused(tmp_path):
    for name, content, message in (
        ("bace", "smiles,class\nC,1\n", "no column `Class`"),
        ("bace", "SMILES,Class\nC,1\n", "no column `smiles`"),
        ("bace", "smiles,Class\nC,1\nCC,active\n", "bace.csv:3: `Class` is `active`"),
        ("bace", "smiles,Class\nC,1\nCC,0\n", "2 rows can be used"),
        ("sider", "smiles,a\nC,1\n", "1 label columns"),
    ):
        (tmp_path / f"{name}.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            load(tmp_path, name)
