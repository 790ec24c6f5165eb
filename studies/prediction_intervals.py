"""Coverage of the intervals of `exlm predict`, in thirds of the distance to the training molecules.

Pinned to commit b512d133 (`README.md`), at which its rows were made.

Two measured properties (ESOL, Lipophilicity) and a computed one with known noise: RDKit's logP of molecules that the
bundled model has not seen, plus normal noise. On each of five splits, three seeds of the head are fine-tuned on the
frozen bundled model and calibrated as `exlm finetune` does. Beside the intervals that this writes to `calibration.json`
are those of one width, from the same residuals, and those of one width in each third of the validation rows (Mondrian),
whose coverage in that third is exact for rows that are exchangeable. The [CLS] state of a molecule is computed once and
kept: with a frozen encoder it is the same in every epoch, seed and split.

    python studies/prediction_intervals.py DATA OUT

DATA holds `moleculenet/{esol,lipo}.csv.gz` and `smiles/valid.txt.xz`. A finished run in OUT is only read. The script
writes `results/prediction_intervals.csv`; it takes minutes on one core.
"""

import argparse
import csv
import gzip
import lzma
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import torch
from rdkit import Chem, rdBase
from rdkit.Chem import Crippen
from scipy.stats import binomtest
from torch import Tensor

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.files import write_csv
from exlm_cli.finetune.calibration import ConformalResiduals, read_scored_split
from exlm_cli.finetune.results import RESULTS_FILE, read_results, read_split_outputs
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.model.heads import TaskModel
from exlm_cli.tasks.base import FloatArray
from rows import RESULTS_DIR

SPLITS = {"esol": ("random", "scaffold-balanced"), "lipo": ("random",), "logp": ("random",)}
NUM_SPLITS, NUM_MOLECULES = 5, 1500
NOISE = 0.5
"""Standard deviation of the noise, in units of logP."""
LEVEL = 0.9
THIRDS = ("nearest", "middle", "farthest")
KINDS = ("exlm predict", "one width", "one width in each third")
COLUMNS = (
    "property", "split", "intervals", "rows", "similarity", "test_rows", "inside", "coverage", "wilson_low",
    "wilson_high", "mean_width", "rmse",
)  # fmt: skip


def write_table(name: str, data: Path, folder: Path) -> Path:
    """Write `<name>.csv` with the columns `smiles` and `value`."""
    path = folder / f"{name}.csv"
    if name == "logp":
        rng = np.random.default_rng(0)
        with lzma.open(data / "smiles/valid.txt.xz", "rt") as file:
            smiles = [line.strip() for line in islice(file, NUM_MOLECULES)]
        with rdBase.BlockLogs():
            exact = [Crippen.MolLogP(Chem.MolFromSmiles(one)) for one in smiles]  # type: ignore[attr-defined]
        noisy = np.array(exact) + NOISE * rng.standard_normal(len(exact))
        write_csv(path, ("smiles", "value"), zip(smiles, map(repr, noisy.tolist()), strict=True))
    else:
        with gzip.open(data / f"moleculenet/{name}.csv.gz", "rt", newline="") as file:
            _, *rows = csv.reader(file)
        write_csv(path, ("smiles", "value"), rows)
    return path


def keep_states() -> None:
    """Make every `TaskModel` compute the [CLS] state of a sequence once."""
    encode, kept = TaskModel.encode, dict[bytes, Tensor]()

    def encode_once(
        self: TaskModel, token_ids: Tensor, lengths: Tensor, is_padded: bool = True, read: Tensor | None = None
    ) -> Tensor:
        ids = [row[:length].numpy().tobytes() for row, length in zip(token_ids, lengths.tolist(), strict=True)]
        new = torch.tensor([row for row, key in enumerate(ids) if key not in kept], dtype=torch.int64)
        if len(new):
            assert self.is_encoder_frozen or not self.training, "the states of an encoder that learns change"
            assert read is not None, "states of [CLS] alone are kept"
            with torch.no_grad():
                states = encode(self, token_ids[new], lengths[new], is_padded, read[new])
            kept.update((ids[row], state.clone()) for row, state in zip(new.tolist(), states, strict=True))
        return torch.stack([kept[key] for key in ids])

    TaskModel.encode = encode_once  # type: ignore[method-assign,assignment]


def fine_tune(table: Path, split: str, run: Path) -> None:
    """Train three seeds of the head on five splits, unless that is done."""
    if (run / RESULTS_FILE).is_file():
        return
    values = {
        "task.files.train": table, "task.smiles_column": "smiles", "task.label_columns": "[value]",
        "task.label_kind": "regression", "task.split": split, "train.freeze_encoder": "true", "train.max_epochs": 8,
        "train.batch_sequences": 64, "optim.lr": 3e-3, "train.num_threads": 1, "device": "cpu",
        "num_replicates": NUM_SPLITS, "seeds": "[1,2,3]",
    }  # fmt: skip
    recipe = load_recipe("csv", [f"{key}={value}" for key, value in values.items()], kind=FinetuneRecipe)
    run_finetuning(recipe, checkpoint="bundled:smiles", out=run)


def measure_split(run: Path) -> tuple[FloatArray, ...]:
    """Return similarity, error, and half-widths of each kind of `KINDS`, of test rows."""
    results = read_results(run)
    rows = read_scored_split(run, results)
    assert rows.signs is not None, "molecules have a similarity"
    _, valid_KNC, targets_NC = read_split_outputs(run, results, "valid")
    residual_n = np.abs(valid_KNC.mean(axis=0) - targets_NC)[:, 0]
    similarity_n, similarity_N = np.array(rows.calibration.similarity["valid"]), rows.signs.similarity
    ends = np.quantile(similarity_n, [1 / 3, 2 / 3])
    third_n, third_N = np.searchsorted(ends, similarity_n), np.searchsorted(ends, similarity_N)
    whole = np.full(len(similarity_N), half_width(residual_n))
    by_third = np.array([half_width(residual_n[third_n == third]) for third in range(3)])[third_N]
    error_N = np.abs(rows.mean - rows.targets)[:, 0]
    return similarity_N, error_N, rows.half_widths[:, 0], whole, by_third


def half_width(residual_n: FloatArray) -> float:
    """Return half the width of plain conformal intervals."""
    return ConformalResiduals(residuals=tuple(np.sort(residual_n).tolist())).half_width(LEVEL)


def rows(name: str, split: str, run: Path) -> Iterator[tuple[object, ...]]:
    """Yield the rows of a property: pooled over the splits, whole and in thirds of the similarity."""
    folders = [run, *sorted((run / "replicates").iterdir())]
    found = [np.concatenate(of_splits) for of_splits in zip(*map(measure_split, folders), strict=True)]
    similarity_N, error_N, *half_widths = found
    thirds = np.array_split(np.argsort(-similarity_N, kind="stable"), len(THIRDS))
    for kind, half_N in zip(KINDS, half_widths, strict=True):
        for third, part in zip(("all", *THIRDS), (np.arange(len(error_N)), *thirds), strict=True):
            num_inside = int((error_N <= half_N)[part].sum())
            wilson = binomtest(num_inside, len(part)).proportion_ci(0.95, method="wilson")
            ends = f"{similarity_N[part].min():.2f} to {similarity_N[part].max():.2f}"
            yield (
                name, split, kind, third, ends, len(part), num_inside, num_inside / len(part), wilson.low, wilson.high,
                2 * half_N[part].mean(), float(np.sqrt(np.mean(error_N[part] ** 2))),
            )  # fmt: skip


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the shared data")
    parser.add_argument("out", type=Path, help="folder of tables and runs")
    parser.add_argument("--only", choices=tuple(SPLITS), help="train for this property, and write no table")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    keep_states()
    found: list[tuple[object, ...]] = []
    for name in (options.only,) if options.only else SPLITS:
        table = write_table(name, options.data, options.out)
        for split in SPLITS[name]:
            run = options.out / f"{name}-{split}"
            fine_tune(table, split, run)
            found += rows(name, split, run)
            for row in found[-len(KINDS) * (1 + len(THIRDS)) :]:
                print(*(f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row), flush=True)
    if not options.only:
        table = ([f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row] for row in found)
        write_csv(RESULTS_DIR / "prediction_intervals.csv", COLUMNS, cast("Iterator[list[object]]", table))


if __name__ == "__main__":
    main()
