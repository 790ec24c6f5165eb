"""Study of what the two bundled models are worth: next to no pre-training, to an MLM, and to methods without a network.

    export PYTHONPATH=studies
    python studies/pretrained/worth.py DATA --text bundled:text --smiles bundled:smiles --smiles-twin RUN
    python studies/pretrained/worth.py DATA ... --only bace bbbp
    python studies/pretrained/worth.py DATA ... --list
    python studies/pretrained/worth.py --table

DATA is the folder of shared data: `text/`, `smiles/`, `glue/` and `moleculenet/`. A cell is one data set, one method
and one split; its figures are rows of `results/worth.csv`, and a cell that has them is not done again. Every process
works on one thread and takes the next cell that no other works on, so start the command twice for two cores. Cells of a
model carry the hash of its weights. `--table` prints the tables of what is done, `--list` what is left.

Every encoder is fine-tuned with the same settings, those below. The words that fill masks, and the sentences of
`clozes.yaml`, are in `results/worth_fillings.csv`.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from exlm_cli.errors import ExlmError
from masks import MASK_RATIO, OWN, fill_clozes, fill_pairs, masked_tokens, unigrams
from models import MODEL, SCRATCH, TWIN, Figures, Models, checkpoint_of
from record import NAME, WORK, locked, record
from rows import read_rows
from tables import table
from tasks import MOLECULES, SPLITS, descriptors, ecfp4, fine_tune, probe, read_task, score_forest, tf_idf


@dataclass(frozen=True)
class Cell:
    """One data set, method and split, and how its figures are found."""

    data: str
    method: str
    split: str
    weights: str
    find: Callable[[], Figures]

    @property
    def key(self) -> tuple[str, ...]:
        """What it has in its rows."""
        return (self.data, self.method, self.split, self.weights)

    def __str__(self) -> str:
        """Return its key as a line shows it."""
        return " · ".join(filter(None, self.key))

    @property
    def lock(self) -> Path:
        """The file that the process that works on it holds."""
        return WORK / "_".join(self.key).replace(" ", "-")


def cells_of(data: Path, text: Models, smiles: Models) -> Iterator[Cell]:
    """Yield all cells of the models that were given, the quick ones first."""
    for method, of in text.items():
        yield Cell("clozes", method, "", of.weights, partial(fill_clozes, of, method))
        yield Cell("pairs", method, "", of.weights, partial(fill_pairs, of, method))
    yield from _masked_cells(data, text, ("wikipedia", "gutenberg"))
    yield from _masked_cells(data, smiles, ("smiles",))
    tasks = [(name, split) for split in SPLITS for name in MOLECULES] if smiles else []
    for name, split in tasks:
        read = partial(read_task, data, name, split)
        yield Cell(name, "forest on ECFP4", str(split), "", partial(score_forest, read, ecfp4))
        yield Cell(name, "forest on RDKit's descriptors", str(split), "", partial(score_forest, read, descriptors))
        for method, of in smiles.items():
            yield Cell(name, f"{method}, frozen", str(split), of.weights, partial(probe, read, of))
    sentences = ("sst2", "mrpc") if text else ()
    for name in sentences:
        yield Cell(name, "TF-IDF, logistic regression", "", "", partial(tf_idf, partial(read_task, data, name, 0)))
    for name in sentences:
        yield from _fine_tuned(data, name, 0, text)
    for name, split in tasks:
        yield from _fine_tuned(data, name, split, smiles)


def _masked_cells(data: Path, models: Models, names: Sequence[str]) -> Iterator[Cell]:
    for name in names if models else ():
        first = models[MODEL]
        yield Cell(name, "unigrams", "", first.weights, partial(unigrams, data, name, first))
        for ratio, (method, of) in itertools.product((OWN, MASK_RATIO), models.items()):
            yield Cell(name, method, ratio, of.weights, partial(masked_tokens, data, name, of, ratio))


def _fine_tuned(data: Path, name: str, split: int, models: Models) -> Iterator[Cell]:
    first, shown = models[MODEL], str(split) if name in MOLECULES else ""
    for method, of in models.items():
        yield Cell(name, method, shown, of.weights, partial(fine_tune, data, name, split, of))
    yield Cell(name, SCRATCH, shown, first.weights, partial(fine_tune, data, name, split, first, scratch=True))


def done_cells() -> set[tuple[str, ...]]:
    """Return the keys of the cells that have rows."""
    return {(row["data"], row["method"], row["split"], row["weights"]) for row in read_rows(NAME)}


def work(cells: Sequence[Cell]) -> list[Cell]:
    """Do every cell that is not done and that no other process works on; return those that failed."""
    failed = []
    for cell in cells:
        with locked(cell.lock, waits=False) as is_ours:
            if not is_ours or cell.key in done_cells():
                continue
            began = time.perf_counter()
            try:
                figures = cell.find()
            except (ExlmError, RuntimeError) as error:
                sys.stderr.write(f"{cell}: {error}\n")
                failed.append(cell)
                continue
            seconds = f"{time.perf_counter() - began:.1f}"
            keys = dict(zip(("data", "method", "split", "weights"), cell.key, strict=True))
            shown = {metric: f"{value:.5f}" for metric, value in figures.items()}
            record(NAME, [keys | {"metric": name, "value": shown[name], "seconds": seconds} for name in shown])
            sys.stderr.write(f"{cell}: {seconds} s, {figures}\n")
    return failed


def main() -> None:
    """Do the cells, list them, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--text", help="text model: bundled:text or a run")
    parser.add_argument("--text-twin", help="its MLM twin, a run")
    parser.add_argument("--smiles", help="model of molecules: bundled:smiles or a run")
    parser.add_argument("--smiles-twin", help="its MLM twin, a run")
    parser.add_argument("--only", nargs="+", help="data of the cells: clozes, pairs, wikipedia, ..., bace, bbbp")
    parser.add_argument("--list", action="store_true", help="print the cells and whether they are done")
    parser.add_argument("--table", action="store_true", help="print the tables of what is done")
    given = parser.parse_args()
    if given.table:
        sys.stdout.write(table() + "\n")
        return
    if given.data is None:
        parser.error("DATA is missing")
    for twin, model in ((given.text_twin, given.text), (given.smiles_twin, given.smiles)):
        if twin and not model:
            parser.error("a twin is given without its model")
    torch.set_num_threads(1)
    text, smiles = (
        {method: checkpoint_of(name) for method, name in ((MODEL, model), (TWIN, twin)) if name}
        for model, twin in ((given.text, given.text_twin), (given.smiles, given.smiles_twin))
    )
    cells = [cell for cell in cells_of(given.data.resolve(), text, smiles) if cell.data in (given.only or [cell.data])]
    if given.list:
        done = done_cells()
        for cell in cells:
            sys.stdout.write(f"{'done' if cell.key in done else '    '} {cell}\n")
        return
    if failed := work(cells):
        sys.exit(f"failed: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
