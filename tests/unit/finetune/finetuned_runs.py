"""Small fine-tuned runs of every kind of task, of files on disk, for the tests of what is done with them."""

import csv
from pathlib import Path
from typing import Any

from exlm_cli.data.smiles import SMILES_TOKEN
from exlm_cli.finetune.run import run_finetuning
from tests.tiny import word_level
from tests.unit.finetune.synthetic import WORDS, finetune_recipe, make_pretrained
from tests.unit.tasks.glue_files import write_glue
from tests.unit.tasks.squad.test_task import write

SMILES = ["CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCl", "CCBr", "CNC", "COC", "C1CC1", "CC#N", "OCCO", "NCCN"]
LONGER = ["C" * n + smiles for n in range(6) for smiles in SMILES]
"""Molecules of the table of `molecule_run`."""


def write_rows(path: Path, columns: list[str], rows: list[list[str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def finetune(
    folder: Path,
    checkpoint: Path,
    seeds: tuple[int, ...] = (1, 2),
    *,
    baseline: bool = False,
    num_replicates: int = 1,
    **task: Any,
) -> Path:
    train = {"max_epochs": 1, "microbatch_tokens": 2048}
    recipe = finetune_recipe(seeds=list(seeds), task=task, train=train, num_replicates=num_replicates)
    return run_finetuning(recipe, checkpoint=checkpoint, out=folder / "run", baseline=baseline).run_dir


def molecule_run(folder: Path, pretrained: Path) -> Path:
    """Two labels over molecules; `toxic` is missing in every fourth row."""
    rows = [[s, str(i % 2), "" if i % 4 == 3 else str(i // 2 % 2)] for i, s in enumerate(LONGER)]
    table = write_rows(folder / "assay.csv", ["mol", "active", "toxic"], rows)
    task = {"smiles_column": "mol", "label_columns": ["active", "toxic"], "split": "random"}
    return finetune(folder, pretrained, name="csv", files={"train": str(table)}, **task)


def smiles_pretrained(folder: Path) -> Path:
    """Its vocabulary has the atoms of these molecules and no others."""
    tokenizer = word_level(sorted(set(SMILES_TOKEN.findall("".join(SMILES)))))
    return make_pretrained(folder / "pretrained", tokenizer, data={"kind": "smiles", "sequence_length": 24})


def words_run(folder: Path, pretrained: Path, label: str, seeds: tuple[int, ...] = (1, 2)) -> Path:
    """Two words a row; `colour` is one of three classes, `side` one of two numbers, `length` a value."""
    rows = [
        [f"{a} {b}", ("red", "green", "blue")[i % 3], str(1 + i % 2), str(len(a) + 0.5 * (i % 7))]
        for i, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS)
    ]
    table = write_rows(folder / "words.csv", ["text", "colour", "side", "length"], rows)
    task = {"name": "csv", "files": {"train": str(table)}, "text_column": "text", "label_columns": [label]}
    return finetune(folder, pretrained, seeds, **task)


def glue_run(folder: Path, pretrained: Path, name: str) -> Path:
    write_glue(folder / "data", name, copies=4)
    return finetune(folder, pretrained, name=f"glue/{name}", data_dir=str(folder / "data"), sequence_length=48)


def squad_run(folder: Path, pretrained: Path) -> Path:
    data = folder / "data"
    data.mkdir()
    write(data, "train-v2.0.json", "Moss", "Tea")
    write(data, "dev-v2.0.json", "Clocks")
    task = {"name": "squad/v2", "data_dir": str(data), "doc_stride": 12, "max_query_tokens": 24}
    return finetune(folder, pretrained, sequence_length=48, **task)


def make_runs(root: Path) -> Path:
    """Make pre-trained `smiles/pretrained` and `text`, fine-tuned `{molecules,rte,squad}/run`; return `text`."""
    for name in ("smiles", "molecules", "rte", "squad"):
        (root / name).mkdir(parents=True)
    molecule_run(root / "molecules", smiles_pretrained(root / "smiles"))
    data, train = {"sequence_length": 24, "bundled_rows": 200}, {"max_steps": 3, "alignment_backend": "reference"}
    text = make_pretrained(root / "text", data=data, train=train)
    glue_run(root / "rte", text, "rte")
    squad_run(root / "squad", text)
    return text
