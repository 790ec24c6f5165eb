"""Both public column layouts load alike; what is left out, kept, repeated or otherwise than Table 9 is told by line."""

import gzip
import hashlib
import lzma
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdkit.Chem import MolFromSmiles, MolToSmiles

from exlm_cli.config.tasks import MoleculeNetTaskConfig
from exlm_cli.data.download import RemoteFile
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks import moleculenet
from exlm_cli.tasks.moleculenet import load_moleculenet
from exlm_cli.tasks.moleculenet_sets import MOLECULENET_SETS
from exlm_cli.tasks.table_task import TableTask
from tests.unit.data.recording import RecordingProgress

# four rings that carry four chains each, for training, and four rings of their own
MOLECULES = [f"C1{'C' * ring}C1{'C' * chain}" for ring in range(1, 5) for chain in range(4)]
MOLECULES += [f"C1{'C' * ring}C1" for ring in range(5, 9)]
SIZES = {"train": 16, "valid": 2, "test": 2}


def csv_of(header: str, rows: list[str]) -> bytes:
    return "\n".join([header, *rows, ""]).encode()


BACE = csv_of("smiles,Class", [f"{m},{i % 2}" for i, m in enumerate(MOLECULES)])


def load(folder: Path, name: str = "bace", **options: Any) -> TableTask:
    return load_moleculenet(
        MoleculeNetTaskConfig(name=f"moleculenet/{name}", data_dir=str(folder), **options), SilentProgress()
    )


@pytest.mark.parametrize(
    ("file", "pack"), [("bace.csv", bytes), ("bace.csv.gz", gzip.compress), ("bace.csv.xz", lzma.compress)]
)
def test_a_set_is_read_from_a_folder(tmp_path: Path, file: str, pack: Any) -> None:
    (tmp_path / file).write_bytes(pack(BACE))
    task = load(tmp_path)
    assert (task.name, task.input_kind, task.loss, task.output_names) == (
        "moleculenet/bace",
        "smiles",
        "binary",
        ("Class",),
    )
    assert (task.split_sizes, task.split_name) == (SIZES, "scaffold")
    assert task.texts("train")[0] == MOLECULES[task.split_indices["train"][0]]


def test_the_model_reads_canonical_smiles_where_asked_to(tmp_path: Path) -> None:
    kekulised = ["C1=CC=CC=C1" + "C" * n for n in range(20)]
    (tmp_path / "bace.csv").write_bytes(csv_of("smiles,Class", [f"{m},{i % 2}" for i, m in enumerate(kekulised)]))
    as_written, canonical = (load(tmp_path, split="random", canonical_smiles=given) for given in (False, True))
    assert as_written.texts("train")[:2] == [kekulised[row] for row in as_written.split_indices["train"][:2]]
    assert all(text == MolToSmiles(MolFromSmiles(text)) and "c1" in text for text in canonical.texts("train"))
    assert as_written.split_indices["train"].tolist() == canonical.split_indices["train"].tolist()


def test_deepchems_columns_are_read_too(tmp_path: Path) -> None:
    rows = [f"{m},BACE_{i},{i % 2},Train,{i / 10}" for i, m in enumerate(MOLECULES)]
    (tmp_path / "bace.csv").write_bytes(csv_of("mol,CID,Class,Model,pIC50", rows))
    ours, theirs = tmp_path / "ours", load(tmp_path)
    ours.mkdir()
    (ours / "bace.csv").write_bytes(BACE)
    assert theirs.texts("train") == load(ours).texts("train")
    assert np.array_equal(theirs.targets("valid"), load(ours).targets("valid"))


def test_a_set_of_many_labels_takes_all_other_columns(tmp_path: Path) -> None:
    labels = [f"MUV-{i}" for i in range(17)]
    rows = [",".join("" if j else str(i % 2) for j in range(17)) + f",CID{i},{m}" for i, m in enumerate(MOLECULES)]
    (tmp_path / "moleculenet").mkdir()
    (tmp_path / "moleculenet" / "muv.csv").write_bytes(csv_of(",".join([*labels, "mol_id", "smiles"]), rows))
    task = load(tmp_path, "muv")
    assert task.output_names == tuple(labels)
    assert np.isnan(task.targets("train")[:, 1:]).all()
    assert not np.isnan(task.targets("train")[:, 0]).any()


def test_an_explicit_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(BACE)
    assert load(tmp_path, files={"train": "mine.csv"}).split_sizes == SIZES


def test_rows_that_are_left_out_or_kept_are_told_by_line(tmp_path: Path) -> None:
    rows = [f"{m},{i % 2}" for i, m in enumerate(MOLECULES)]
    rows[3:3] = ["C1CC,0", "CC(=O)O[AlH3](O)O,0", "C1CC,0", f"{MOLECULES[0]},0"]
    (tmp_path / "bace.csv").write_bytes(csv_of("smiles,Class", rows))
    task = load(tmp_path)
    broken = "RDKit cannot parse it: it breaks the SMILES grammar"
    assert task.notes[:4] == (
        f"left out 2 of 24 rows that are no molecules: line 5: {broken}; line 7: {broken}",
        "kept 1 molecules in which RDKit refuses the valence of a metal and nothing else: lines 6",
        "left out 1 rows whose SMILES stands in an earlier one: lines 8",
        "16/2/3 molecules, Table 9 has 1,210/151/151",
    )
    used = np.concatenate(list(task.split_indices.values()))
    assert sorted(used.tolist()) == [0, 1, 2, 4, *range(7, 24)]
    path = str(tmp_path / "bace.csv")
    assert [(row.file, row.row, row.text, row.reason) for row in task.left_out] == [
        (path, "5", "C1CC", broken), (path, "7", "C1CC", broken),
        (path, "8", MOLECULES[0], f"its SMILES stands in {path}:2 too"),
    ]  # fmt: skip


def test_bad_rows_stop_where_asked_to(tmp_path: Path) -> None:
    (tmp_path / "bace.csv").write_bytes(BACE.replace(b"smiles,Class\n", b"smiles,Class\n,0\n"))
    path = tmp_path / "bace.csv"
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}:2: no molecule: is empty$"):
        load(tmp_path, on_invalid="error")


def test_a_molecule_in_two_splits_is_told(tmp_path: Path) -> None:
    rows = [f"{'C' * n}O,{n % 2}" for n in range(1, 31)]
    rows += [f"O{'C' * n},{1 - n % 2}" for n in range(1, 31)]
    (tmp_path / "bace.csv").write_bytes(csv_of("smiles,Class", rows))
    task = load(tmp_path, split="random")
    home = {row: split for split, part in task.split_indices.items() for row in part.tolist()}
    num_across = sum(home[row] != home[row + 30] for row in range(30))
    assert num_across > 3
    across, differing = task.notes[-2:]
    assert across.startswith(f"{num_across} molecules are in more than one split: line ")
    assert differing.startswith(
        "30 molecules occur more than once with different labels: lines 2 and 32, lines 3 and 33"
    )


def test_a_random_split_spreads_the_classes(tmp_path: Path) -> None:
    rows = [f"{'C' * n}O,{int(n % 5 == 0)}" for n in range(1, 101)]
    (tmp_path / "bace.csv").write_bytes(csv_of("smiles,Class", rows))
    task = load(tmp_path, split="random")
    assert task.split_name == "random"
    counts = {split: Counter(task.targets(split)[:, 0].tolist()) for split in task.splits}
    assert counts == {"train": {0: 64, 1: 16}, "valid": {0: 8, 1: 2}, "test": {0: 8, 1: 2}}


def test_a_split_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "bace.csv").write_bytes(BACE.replace(f"{MOLECULES[19]},1".encode(), b"C1CC,1"))
    split = tmp_path / "split.json"
    split.write_text('{"train": [0, 1, 2], "valid": [4, 5], "test": [19, 6]}')
    task = load(tmp_path, split="file", split_file=str(split))
    assert {name: rows.tolist() for name, rows in task.split_indices.items()} == {
        "train": [0, 1, 2],
        "valid": [4, 5],
        "test": [6],
    }
    assert f"1 rows of {split} cannot be used" in task.notes
    assert f"13 rows are in no split of {split}" in task.notes


def test_a_split_file_in_the_home_of_an_unknown_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bace.csv").write_bytes(BACE)
    message = "~nosuchuser/s.json: there is no home folder that `~nosuchuser` could stand for"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load(tmp_path, split="file", split_file="~nosuchuser/s.json")


def test_training_rows_can_be_limited(tmp_path: Path) -> None:
    (tmp_path / "bace.csv").write_bytes(BACE)
    task = load(tmp_path, max_rows=5)
    assert task.split_sizes == {**SIZES, "train": 5}
    assert task.notes[0] == "trained on 5 of 16 rows (`task.max_rows`)"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"smiles,class\nC,1\n", "no column `Class`; there are `smiles`, `class`"),
        (b"SMILES,Class\nC,1\n", "no column `smiles`; there are `SMILES`, `Class`"),
    ],
)
def test_a_missing_column_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bace.csv").write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / 'bace.csv'))}: {re.escape(message)}$"):
        load(tmp_path)


def test_another_smiles_column_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "bace.csv").write_bytes(BACE.replace(b"smiles", b"SMILES"))
    assert load(tmp_path, smiles_column="SMILES").split_sizes["train"] == 16


def test_a_label_that_is_not_0_or_1_is_named_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "bace.csv").write_bytes(b"smiles,Class\nC,1\nCC,active\n")
    path = tmp_path / "bace.csv"
    with pytest.raises(DataError, match=f"^{path}:3: `Class` is `active`; accepted: 0, 1 or empty$"):
        load(tmp_path)


def test_a_set_of_another_width_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sider.csv").write_bytes(b"smiles,a\nC,1\n")
    with pytest.raises(DataError, match=r"sider.csv: 1 label columns, sider has 27$"):
        load(tmp_path, "sider")


def test_too_few_molecules_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bace.csv").write_bytes(b"smiles,Class\nC,1\nCC,0\n")
    message = "moleculenet/bace: 2 rows can be used, a split 80/10/10 needs at least 10"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    message = f"{tmp_path}: no bbbp.csv or BBBP.csv, nor one with .gz or .xz"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load(tmp_path, "bbbp")


def test_without_a_folder_the_file_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fetched.csv").write_bytes(BACE)
    asked: list[Any] = []

    def fetch(remote: RemoteFile, folder: str, progress: Any, *, hint: str) -> Path:
        asked.extend((remote, folder, hint))
        return tmp_path / "fetched.csv"

    monkeypatch.setattr(moleculenet, "fetch_once", fetch)
    progress = RecordingProgress()
    load_moleculenet(MoleculeNetTaskConfig(name="moleculenet/bace"), progress)
    assert asked[:2] == [MOLECULENET_SETS["bace"].remote, "moleculenet"]
    assert asked[2] == (
        "`--data-dir DIR` (in a grid or sweep `--set finetune.task.data_dir=DIR`) reads bace.csv (also .gz, .xz) of "
        "your own instead"
    )
    assert progress.messages == [f"moleculenet/bace: 20 rows of {tmp_path / 'fetched.csv'}"]


def test_the_sizes_are_those_of_table_9() -> None:
    # Table 9 of the paper, typed from it
    printed = {
        "bace": (1210, 151, 151), "bbbp": (1631, 204, 204), "clintox": (1182, 148, 148), "tox21": (6264, 783, 783),
        "toxcast": (6860, 858, 858), "sider": (1141, 143, 143), "muv": (74469, 9309, 9309),
    }  # fmt: skip
    tasks = {"bace": 1, "bbbp": 1, "clintox": 2, "tox21": 12, "toxcast": 617, "sider": 27, "muv": 17}
    assert {name: known.table_9 for name, known in MOLECULENET_SETS.items()} == printed
    assert {name: known.num_labels for name, known in MOLECULENET_SETS.items()} == tasks


def test_a_row_more_than_in_table_9_is_explained() -> None:
    known = MOLECULENET_SETS["bace"]
    indices: Any = {"train": range(1210), "valid": range(151), "test": range(152)}
    assert moleculenet._compare_with_table_9(known, indices) == [
        "1,210/151/152 molecules, Table 9 has 1,210/151/151: Table 9 prints a tenth, rounded down, for validation and "
        "for testing; the rest of the rows is tested on too"
    ]
    assert moleculenet._compare_with_table_9(known, {**indices, "test": range(151)}) == []


def test_public_homes_are_pinned() -> None:
    for known in MOLECULENET_SETS.values():
        assert re.search(r"/[0-9a-f]{40}/", known.remote.url)
        assert known.remote.url.startswith("https://")
        assert len(bytes.fromhex(known.remote.sha256)) == hashlib.sha256().digest_size


def test_missing_labels_are_nan(tmp_path: Path) -> None:
    (tmp_path / "clintox.csv").write_bytes(
        csv_of("smiles,FDA_APPROVED,CT_TOX", [f"{m},{i % 2}," for i, m in enumerate(MOLECULES)])
    )
    task = load(tmp_path, "clintox")
    assert all(math.isnan(value) for value in task.targets("train")[:, 1])
    assert "50.0 % of the labels are missing; they are left out of loss and scores" in task.notes
