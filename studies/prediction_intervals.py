"""Coverage and width of the intervals of `exlm predict` on a property with known noise.

Pinned to commit 3d172fa5 (`README.md`); its rows were made at 3574a2e, with weights of aa6f1e3.

The property is RDKit's logP of bundled molecules plus normal noise. A run is fine-tuned on 45 % of the rows and
calibrated on 10 %; `exlm predict` writes intervals for the other rows. Beside them are intervals scaled by the spread
over the seeds, and the spread taken for an error bar. The validation rows are also drawn anew, 200 times,
from all rows that are not trained on: the mean coverage over the draws does not depend on the luck of one split.

    exlm pretrain --recipe quickstart-smiles-mlm --set train.max_steps=300 --set model.num_layers=2 --out OUT/pretrained
    python studies/prediction_intervals.py OUT --checkpoint OUT/pretrained

A finished run in OUT/run is only read. The script writes `results/prediction_intervals.csv`.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rdkit import Chem, rdBase
from rdkit.Chem import Crippen
from scipy import stats

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.data.bundled.molecules import generate_molecules
from exlm_cli.files import write_csv
from exlm_cli.finetune.calibration import ConformalResiduals
from exlm_cli.finetune.model import load_finetuned
from exlm_cli.finetune.predict import predict
from exlm_cli.finetune.results import RESULTS_FILE, read_split_outputs
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import FloatArray
from rows import RESULTS_DIR

NUM_MOLECULES, TRAIN_SHARE, VALID_SHARE = 9000, 0.45, 0.1
NOISE = 0.5
"""Standard deviation of the noise, in units of logP."""
LEVELS = (0.8, 0.9, 0.95)
NUM_DRAWS = 200
SCALES = {"absolute": None, "by spread": 0.0, "by spread + median": 1.0}
"""Residuals are divided by the spread plus this many medians of it; None: not divided."""
COLUMNS = (
    "intervals",
    "level",
    "coverage",
    "mean_width",
    "mean_coverage",
    "coverage_sd",
    "least_spread",
    "most_spread",
)


def write_molecules(folder: Path) -> None:
    """Write `molecules.csv`, whose column `part` says train, valid or test, and `new.csv` with the test rows."""
    rng, rows = np.random.default_rng(0), []
    molecules = generate_molecules(NUM_MOLECULES, 0)
    for place, index in enumerate(rng.permutation(NUM_MOLECULES).tolist()):
        share = place / NUM_MOLECULES
        part = "train" if share < TRAIN_SHARE else "valid" if share < TRAIN_SHARE + VALID_SHARE else "test"
        with rdBase.BlockLogs():
            log_p = Crippen.MolLogP(Chem.MolFromSmiles(molecules[index]))  # type: ignore[attr-defined]
        rows.append((molecules[index], repr(float(log_p + NOISE * rng.standard_normal())), part))
    header = ("smiles", "logP", "part")
    write_csv(folder / "molecules.csv", header, rows)
    write_csv(folder / "new.csv", header[:2], (row[:2] for row in rows if row[2] == "test"))


def fine_tune(folder: Path, checkpoint: Path) -> None:
    """Train three seeds for eight epochs, unless that is done."""
    if (folder / "run" / RESULTS_FILE).is_file():
        return
    values = {
        "task.files.train": folder / "molecules.csv", "task.smiles_column": "smiles", "task.label_columns": "[logP]",
        "task.split_column": "part", "train.max_epochs": 8, "optim.lr": 1e-3, "train.num_threads": 1, "device": "cpu",
    }  # fmt: skip
    recipe = load_recipe("csv", [f"{key}={value}" for key, value in values.items()], kind=FinetuneRecipe)
    run_finetuning(recipe, checkpoint=checkpoint, out=folder / "run")


def measure_files(folder: Path, level: float) -> tuple[float, float]:
    """Return coverage and mean width of the intervals that `exlm predict` writes for the test rows."""
    out = folder / "predictions.csv"
    finetuned = load_finetuned(folder / "run", device="cpu")
    predict(finetuned, folder / "new.csv", out, folder=folder, interval_level=level, progress=SilentProgress())
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    ends = [f"logP_{end}_{100 * level:g}" for end in ("low", "high")]
    low_N, high_N, true_N = (np.array([float(row[name]) for row in rows]) for name in (*ends, "logP"))
    return float(np.mean((low_N <= true_N) & (true_N <= high_N))), float(np.mean(high_N - low_N))


def measure_draws(
    residual_N: FloatArray, spread_N: FloatArray, num_valid: int, level: float, scale: float | None
) -> tuple[float, ...]:
    """Return own coverage and width, then over random draws of the validation rows the mean coverage, its deviation,
    and the coverage of the quarters of rows with the least and the greatest spread.
    """
    divisor_N = np.ones_like(spread_N) if scale is None else spread_N + scale * np.median(spread_N[:num_valid])
    rng, found = np.random.default_rng(0), []
    orders = [np.arange(len(residual_N)), *(rng.permutation(len(residual_N)) for _ in range(NUM_DRAWS))]
    for order in orders:
        valid, test = order[:num_valid], order[num_valid:]
        scores = np.sort(residual_N[valid] / divisor_N[valid])
        half_N = ConformalResiduals(residuals=tuple(scores.tolist())).half_width(level) * divisor_N[test]
        is_inside_N = residual_N[test] <= half_N
        by_spread = is_inside_N[np.argsort(spread_N[test])]
        quarter = len(test) // 4
        found.append((is_inside_N.mean(), 2 * half_N.mean(), by_spread[:quarter].mean(), by_spread[-quarter:].mean()))
    own, drawn = found[0], np.array(found[1:])
    return (*own[:2], drawn[:, 0].mean(), drawn[:, 0].std(), drawn[:, 2].mean(), drawn[:, 3].mean())


def rows(folder: Path) -> Iterator[tuple[object, ...]]:
    """Yield the rows of the table; the first ones are the files that `exlm predict` writes."""
    results = load_finetuned(folder / "run", device="cpu").results
    parts = [read_split_outputs(folder / "run", results, split) for split in ("valid", "test")]
    predicted_KN = np.concatenate([predicted_KNC[..., 0] for _, predicted_KNC, _ in parts], axis=1)
    true_N = np.concatenate([targets_NC[:, 0] for _, _, targets_NC in parts])
    spread_N, num_valid = predicted_KN.std(axis=0, ddof=1), len(parts[0][0])
    residual_N = np.abs(predicted_KN.mean(axis=0) - true_N)
    print(f"{num_valid} validation and {len(true_N) - num_valid} test rows, RMSE {np.sqrt(np.mean(residual_N**2)):.3f}")
    for level in LEVELS:
        yield "exlm predict", level, *measure_files(folder, level), "", "", "", ""
        for name, scale in SCALES.items():
            yield name, level, *measure_draws(residual_N, spread_N, num_valid, level, scale)
        perfect = 2 * NOISE * stats.norm.ppf((1 + level) / 2)
        yield "of the noise alone", level, level, perfect, "", "", "", ""
    is_inside_N = residual_N <= spread_N
    yield (
        "prediction ± seed spread",
        "",
        is_inside_N[num_valid:].mean(),
        2 * spread_N[num_valid:].mean(),
        "",
        "",
        "",
        "",
    )


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of molecules, run and predictions")
    parser.add_argument("--checkpoint", type=Path, required=True, help="run of `exlm pretrain` on SMILES")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_molecules(options.out)
    fine_tune(options.out, options.checkpoint)
    path = RESULTS_DIR / "prediction_intervals.csv"
    table = ([f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row] for row in rows(options.out))
    write_csv(path, COLUMNS, table)
    print(path.read_text())


if __name__ == "__main__":
    main()
