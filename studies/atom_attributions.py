"""Are atoms ranked as they should be by the change of a prediction when they are masked?

The truth is known where the label is a sum over atoms: RDKit's Crippen logP. The bundled model is fine-tuned on the
logP of molecules that it has not seen, and the atoms of held-out molecules are explained as `exlm predict --explain`
does. Beside it are the weights of RDKit's similarity maps (the change of the prediction when the fingerprint bits of
an atom are left out) of random forests on bits and counts of Morgan fingerprints, trained on the same rows, and the
changes of the model in random order. Each is compared with RDKit's contributions by Spearman's correlation over the
atoms of a molecule, and averaged over molecules. RDKit gives contributions of heavy atoms and of hydrogens; masking
an atom hides its hydrogens too, so both the heavy atoms' own and the sums with their hydrogens are truths.

    python studies/atom_attributions.py DATA OUT

DATA holds `smiles/valid.txt.xz`. A finished run in OUT is only read. The script writes `results/atom_attributions.csv`;
it takes about ten minutes on one core.
"""

import argparse
import csv
import json
import lzma
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from rdkit import Chem, rdBase
from rdkit.Chem import Crippen, rdMolDescriptors
from scipy.stats import spearmanr
from sklearn.ensemble import RandomForestRegressor

from exlm_cli.api.run import load
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.files import write_csv
from exlm_cli.finetune.predictions import read_rows, read_seed_predictions
from exlm_cli.finetune.results import RESULTS_FILE, read_results
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.run_dir import SPLIT_FILE
from exlm_cli.tasks.base import FloatArray
from rows import append_row, mean_and_half, surroundings

NUM_MOLECULES, MAX_CHARACTERS, NUM_EXPLAINED = 2400, 36, 120
"""Short SMILES, so that a core fine-tunes on them in minutes."""
NUM_TREES, NUM_PERMUTATIONS, NUM_BITS = 200, 20, 2048
FORESTS = {"bv": "forest, Morgan bits", "count": "forest, Morgan counts"}
TRUTHS = ("heavy atoms", "heavy atoms with their hydrogens")


def write_table(data: Path, path: Path) -> None:
    """Write the logP of the first short molecules of the validation file."""
    rows: list[tuple[str, str]] = []
    with lzma.open(data / "smiles/valid.txt.xz", "rt") as file, rdBase.BlockLogs():
        for line in file:
            smiles = line.strip()
            if len(smiles) > MAX_CHARACTERS or "." in smiles:
                continue
            rows.append((smiles, f"{Crippen.MolLogP(Chem.MolFromSmiles(smiles)):.5f}"))  # type: ignore[attr-defined]
            if len(rows) == NUM_MOLECULES:
                break
    write_csv(path, ("smiles", "logp"), rows)


def fine_tune(table: Path, run: Path) -> None:
    """Fine-tune one seed of the bundled model, unless that is done."""
    if (run / RESULTS_FILE).is_file():
        return
    values = {
        "task.files.train": table, "task.smiles_column": "smiles", "task.label_columns": "[logp]",
        "task.label_kind": "regression", "task.split": "random", "train.max_epochs": 6, "train.batch_sequences": 16,
        "train.num_threads": 1, "device": "cpu", "seeds": "[1]",
    }  # fmt: skip
    recipe = load_recipe("csv-encoder", [f"{key}={value}" for key, value in values.items()], kind=FinetuneRecipe)
    run_finetuning(recipe, checkpoint="bundled:smiles", out=run)


def contributions(smiles: str) -> tuple[FloatArray, FloatArray]:
    """Return RDKit's (A,) contributions of heavy atoms, and their sums with those of their hydrogens."""
    molecule = Chem.MolFromSmiles(smiles)
    whole = Chem.AddHs(molecule)
    of_each = np.array(rdMolDescriptors._CalcCrippenContribs(whole))[:, 0]
    num_heavy = molecule.GetNumAtoms()
    own, with_hydrogens = of_each[:num_heavy], of_each[:num_heavy].copy()
    for atom in list(whole.GetAtoms())[num_heavy:]:
        with_hydrogens[atom.GetNeighbors()[0].GetIdx()] += of_each[atom.GetIdx()]
    return own, with_hydrogens


def forest_weights(kind: str, train: list[str], values: FloatArray, smiles: list[str]) -> list[FloatArray]:
    """Return the (A,) atomic weights of RDKit's similarity maps for each molecule, and train the forest that they need.

    Args:
        kind: `bv` for bits, `count` for counts of Morgan fingerprints, of radius 2 and 2,048 places.
        train: Training molecules, with their values.
        smiles: Molecules to explain.
    """
    from rdkit.Chem.Draw import SimilarityMaps

    def fingerprints(molecule: Chem.Mol, atoms: Iterable[int]) -> FloatArray:
        """Return the fingerprint without the bits of each atom; -1: with all."""
        found = [SimilarityMaps.GetMorganFingerprint(molecule, atom, 2, kind) for atom in atoms]  # type: ignore[no-untyped-call]
        rows = np.zeros((len(found), NUM_BITS))
        for row, bits in zip(rows, found, strict=True):
            elements = dict.fromkeys(bits.GetOnBits(), 1) if kind == "bv" else bits.GetNonzeroElements()
            for bit, number in elements.items():
                row[bit % NUM_BITS] += number
        return rows

    forest = RandomForestRegressor(NUM_TREES, max_features=1 / 3, random_state=1, n_jobs=1)
    forest.fit(np.concatenate([fingerprints(Chem.MolFromSmiles(one), [-1]) for one in train]), values)
    weights = []
    for molecule in map(Chem.MolFromSmiles, smiles):
        predicted = forest.predict(fingerprints(molecule, range(-1, molecule.GetNumAtoms())))
        weights.append(predicted[0] - predicted[1:])
    return weights


def permuted(changes: list[FloatArray]) -> list[list[FloatArray]]:
    """Return the changes of each molecule in many random orders."""
    rng = np.random.default_rng(0)
    return [[rng.permutation(of_one) for _ in range(NUM_PERMUTATIONS)] for of_one in changes]


def correlations(found: list[list[FloatArray]], truths: list[FloatArray]) -> list[float]:
    """Return Spearman's correlation of each molecule's atoms with the truth, the mean of several orders."""
    return [
        float(np.mean([spearmanr(one, truth)[0] for one in of_molecule]))
        for of_molecule, truth in zip(found, truths, strict=True)
    ]


def measure(run: Path) -> Iterator[dict[str, object]]:
    """Yield a row for each method and truth."""
    results = read_results(run)
    rows = read_rows(run, results.loss, results.output_names)[results.split_seeds[0]]["test"]
    smiles, true_N1 = list(rows.inputs)[:NUM_EXPLAINED], rows.targets
    predicted_N1 = read_seed_predictions(run, results, {"test": rows.rows})["test"][0]
    train_rows = read_split(run)
    with (run.parent / "logp.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    train = [table[row]["smiles"] for row in train_rows]
    values = np.array([float(table[row]["logp"]) for row in train_rows])
    started = time.process_time()
    explained = load(run, device="cpu").explain(smiles)
    seconds = time.process_time() - started
    changes = [of_one[:, 0] for of_one in explained.changes]
    found: dict[str, list[list[FloatArray]]] = {
        "masked atoms": [[of_one] for of_one in changes],
        "masked atoms, permuted": permuted(changes),
    }
    for kind, name in FORESTS.items():
        found[name] = [[of_one] for of_one in forest_weights(kind, train, values, list(explained.smiles))]
    truths = dict(zip(TRUTHS, zip(*map(contributions, explained.smiles), strict=True), strict=True))
    rmse = float(np.sqrt(np.mean((predicted_N1 - true_N1) ** 2)))
    for truth, of_truth in truths.items():
        ours = correlations(found["masked atoms"], list(of_truth))
        for method, of_method in found.items():
            values_N = correlations(of_method, list(of_truth))
            mean, half = mean_and_half(values_N)
            gain = [one - other for one, other in zip(ours, values_N, strict=True)]
            gain_mean, gain_half = mean_and_half(gain) if method != "masked atoms" else (0.0, 0.0)
            yield {
                "truth": truth, "method": method, "molecules": len(values_N), "spearman": f"{mean:.4f}",
                "half_95": f"{half:.4f}", "above_0.5": f"{np.mean(np.array(values_N) > 0.5):.4f}",
                "gain_of_masked_atoms": f"{gain_mean:.4f}", "gain_half_95": f"{gain_half:.4f}",
                "test_rmse": f"{rmse:.4f}", "seconds_per_molecule": f"{seconds / len(smiles):.3f}",
                **surroundings(torch.device("cpu")),
            }  # fmt: skip


def read_split(run: Path) -> list[int]:
    """Return the training rows."""
    rows: list[int] = json.loads((run / SPLIT_FILE).read_bytes())["indices"]["train"]
    return rows


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the shared data")
    parser.add_argument("out", type=Path, help="folder of the table and the run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    write_table(options.data, options.out / "logp.csv")
    fine_tune(options.out / "logp.csv", options.out / "run")
    with rdBase.BlockLogs():
        for row in measure(options.out / "run"):
            print(*list(row.values())[:8], flush=True)
            append_row("atom_attributions", row)


if __name__ == "__main__":
    main()
