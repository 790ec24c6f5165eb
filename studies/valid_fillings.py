"""Do tokens drawn for the masks of a molecule fit each other? The share of drawn fillings that are valid SMILES.

Its rows were made at c6643d6 to 7e18c0a, and each names its own.

An MLM draws the token of each mask on its own. ExLM draws a path of T states through its DAG, then a token from each
state. All runs see the same molecules with the same masks, so that differences are paired.

    python studies/valid_fillings.py mlm=RUN exlm=RUN --file held-out.smi --reference mlm --mask-ratio 0.387

Each run is a row of `results/valid_fillings.csv`. `valid` is the share of valid SMILES among the drawn fillings,
`valid_best` that among the fillings with the likeliest token of each mask on its own, `recovered` the share of drawn
fillings that are the molecule itself. Intervals are over molecules.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from exlm_cli.dag.build import dag_of_tokens
from exlm_cli.dag.fillings import independent_guess
from exlm_cli.dag.graph import Dag
from exlm_cli.data.masking import Masker, Sequences
from exlm_cli.data.molecules import find_invalid_smiles
from exlm_cli.train.pretrained import Pretrained, load_pretrained
from rows import append_row, mean_and_half, surroundings

NAME = "valid_fillings"
FIGURES = ("valid", "valid_best", "recovered")


def draw_path(dag: Dag, rng: np.random.Generator) -> list[int]:
    """Draw T inner nodes of a path, by the probability of the path given that it has exactly T."""
    inner = slice(1, dag.num_nodes - 1)
    # row t: probability that a path goes from each node through t more inner nodes to EOS
    ways_TS = [dag.trans[:, -1]]
    for _ in range(dag.num_masks):
        ways_TS.append(dag.trans[:, inner] @ ways_TS[-1][inner])
    node, path = 0, []
    for num_left in reversed(range(dag.num_masks)):
        chances = dag.trans[node, inner] * ways_TS[num_left][inner]
        node = 1 + int(rng.choice(len(chances), p=chances / chances.sum()))
        path.append(node)
    return path


def draw_tokens(dag: Dag, rng: np.random.Generator) -> list[int]:
    """Draw a token for each mask: a path, then a token from each of its nodes."""
    probs_TV = np.exp(dag.node_log_probs[draw_path(dag, rng)])
    return [int(rng.choice(len(probs), p=probs / probs.sum())) for probs in probs_TV]


def masked_molecules(
    pretrained: Pretrained, molecules: Sequence[str], mask_ratio: float
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield each molecule that the model can take, and its tokens with [CLS], [MASK]s and [SEP]."""
    recipe, tokenizer = pretrained.recipe, pretrained.tokenizer
    masking = recipe.masking.model_copy(update={"mask_ratio": mask_ratio})
    masker = Masker(masking, tokenizer, seed=1, epoch=0)
    longest = recipe.data.sequence_length - 2
    for index, smiles in enumerate(molecules):
        ids = np.array([tokenizer.encode(smiles)])
        if ids.shape[1] <= longest and tokenizer.unk_id not in ids:
            masked = masker.mask(Sequences(ids, np.array([ids.shape[1]]), np.array([index])))
            if masked.is_masked.any():
                yield tokenizer.decode(ids[0].tolist()), masked.input_ids[0]


def score(pretrained: Pretrained, molecules: Sequence[str], mask_ratio: float, num_draws: int) -> NDArray[np.float64]:
    """Return the (M, 3) `FIGURES` of the M molecules that the model can take."""
    rows = []
    for index, (smiles, input_ids) in enumerate(masked_molecules(pretrained, molecules, mask_ratio)):
        dag = dag_of_tokens(pretrained.model, pretrained.tokenizer, pretrained.recipe, input_ids)
        rng = np.random.default_rng(index)
        drawn = [dag.fill([[token] for token in draw_tokens(dag, rng)]) for _ in range(num_draws)]
        valid = np.mean([find_invalid_smiles(text) is None for text in drawn])
        recovered = np.mean([text == smiles for text in drawn])
        rows.append((valid, float(bool(independent_guess(dag).filling.is_valid_smiles)), recovered))
    return np.array(rows)


def main() -> None:
    """Score the runs, append their rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN", help="pre-trained on SMILES, with equal vocabularies")
    parser.add_argument("--file", type=Path, required=True, help="SMILES, one a line")
    parser.add_argument("--reference", required=True, metavar="LABEL", help="the run that others are compared with")
    parser.add_argument("--mask-ratio", type=float, required=True)
    parser.add_argument("--molecules", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=8)
    given = parser.parse_args()
    runs = dict(run.split("=", 1) for run in given.runs)
    if given.reference not in runs:
        parser.error(f"--reference: no run is called {given.reference}")
    torch.set_num_threads(1)
    molecules = given.file.read_text(encoding="utf-8").split("\n")[: given.molecules]
    models = {label: load_pretrained(Path(run), device="cpu") for label, run in runs.items()}
    if len({(model.recipe.data.sequence_length, model.tokenizer.fingerprint) for model in models.values()}) > 1:
        parser.error("the runs differ in `data.sequence_length` or tokenizer, so they take different molecules")
    scores = {label: score(model, molecules, given.mask_ratio, given.draws) for label, model in models.items()}
    for label, of_run in scores.items():
        gaps = dict.fromkeys(FIGURES, "")
        if label != given.reference:
            gaps = {
                figure: "{:+.3f} ± {:.3f}".format(*mean_and_half(list(gap)))
                for figure, gap in zip(FIGURES, (of_run - scores[given.reference]).T, strict=True)
            }
        means = {figure: f"{mean:.4f}" for figure, mean in zip(FIGURES, of_run.mean(0), strict=True)}
        row = {"model": label, "reference": given.reference, "mask_ratio": given.mask_ratio, "molecules": len(of_run)}
        row |= {"draws": given.draws, **means, **{f"{figure}_less_reference": gap for figure, gap in gaps.items()}}
        append_row(NAME, row | surroundings(torch.device("cpu")))
        sys.stdout.write(f"{label}: {means} {gaps}\n")


if __name__ == "__main__":
    main()
