"""Study of the DAG's collapse: which settings learn that two masked words depend on each other?

Pinned to commit 3d172fa5 (`README.md`); its rows were made at c40adcc to 6cc9e3d, and each names its own.

The corpus is one sentence with two masked words that share a sentiment: eight words each, four good and four bad,
equally likely. A model that predicts each mask alone needs at least ln 8 = 2.0794 nats per word; the truth is
(ln 8 + ln 4) / 2 = 1.7329. The share of this gap that a model closes is the share of the mutual information that it
captures. Changes of the recipe are those of `exlm pretrain --set`; a cue in the corpus and an entropy bonus, which are
no recipe keys, are implemented here. The script adds one CSV row per variant and seed and skips rows that exist.

    python studies/collapse.py --list
    python studies/collapse.py --variants mlm paper "paper, batch 512" --seeds 0 1 2
"""

import argparse
import csv
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.batch import Batch, batch_from_masked_ids
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.alignment import alignment_posterior, states_alignment_nll
from exlm_cli.ops.path_prior import state_imbalance
from exlm_cli.run_dir import describe_environment
from exlm_cli.train.optim import build_optimizer, learning_rate

PAD, CLS, SEP, MASK = 0, 1, 2, 3
FIRST, SECOND = 20, 28
"""Each masked word is one of eight tokens: four good, then four bad."""
SENTENCE = np.array([CLS, 10, 11, MASK, 12, 13, 14, 15, MASK, 16, 17, 18, 19, SEP])
CUE_POSITION, CUES = 2, (11, 36, 37)
"""No cue, a good cue and a bad cue."""
VOCABULARY = 40
K = 4
INDEPENDENCE_BOUND, TRUTH = math.log(8), (math.log(8) + math.log(4)) / 2

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """Changes of the study's recipe and of its training."""

    changes: Changes = field(default_factory=dict)
    batch_sequences: int = 128
    steps_factor: int = 1
    cue_share: float = 0.0
    """Share of sentences in which another word reveals the sentiment."""
    entropy_bonus: float = 0.0
    """Weight of the mean entropy of the transitions out of a node, subtracted from the loss."""


LANES, BALANCE = {"start": "lanes"}, {"balance": 0.1}
VECTORS = {"clone_embedding": "nodes", "clone_init_std": 1.0}
PAPER: Changes = {}
ALL_THREE: Changes = {"model": VECTORS | {"transition": LANES | BALANCE}}


def around(name: str, base: Changes) -> dict[str, Variant]:
    """Return a base and its variants with one change each."""

    def changed(section: str, **values: Any) -> Variant:
        return Variant(base | {section: base.get(section, {}) | values})

    transition = base.get("model", {}).get("transition", {})
    variants = {
        "": Variant(base),
        "5 x the steps": Variant(base, steps_factor=5),
        "learning rate 3e-4": changed("optim", lr=3e-4),
        "learning rate 3e-3": changed("optim", lr=3e-3),
        "batch 32": Variant(base, batch_sequences=32),
        "batch 512": Variant(base, batch_sequences=512),
        "width 128": changed("model", width=128, ffn_width=512),
        "4 layers": changed("model", num_layers=4),
        "dropout 0.1": changed("model", dropout=0.1, attention_dropout=0.1),
        "weights of spread 0.1": changed("model", init_std=0.1),
        "8 gated heads, positions": changed("model", transition=transition | {"heads": 8, "position_features": True}),
        "entropy bonus 0.1": Variant(base, entropy_bonus=0.1),
        "a cue in half of the sentences": Variant(base, cue_share=0.5),
    }
    return {f"{name}, {change}" if change else name: variant for change, variant in variants.items()}


VARIANTS: dict[str, Variant] = {
    "mlm": Variant({"": {"objective": "mlm"}, "masking": {"num_states_per_mask": 1}, "model": {"rope": "1d"}}),
    "lanes": Variant({"model": {"transition": LANES}}),
    "clone vectors": Variant({"model": VECTORS}),
    "penalty": Variant({"model": {"transition": BALANCE}}),
    "lanes + clone vectors": Variant({"model": VECTORS | {"transition": LANES}}),
    "lanes + penalty": Variant({"model": {"transition": LANES | BALANCE}}),
    "clone vectors + penalty": Variant({"model": VECTORS | {"transition": BALANCE}}),
    **around("paper", PAPER),
    **around("lanes + clone vectors + penalty", ALL_THREE),
}


@dataclass(frozen=True)
class Outcome:
    """Result of one training run, measured without dropout under the true distribution of the pairs."""

    nll_nats: float
    effective_states: float
    wall_s: float

    @property
    def captured_share(self) -> float:
        """Share of the mutual information between the two words that the model captures."""
        return (INDEPENDENCE_BOUND - self.nll_nats) / (INDEPENDENCE_BOUND - TRUTH)


def build_recipe(variant: Variant, steps: int, seed: int) -> PretrainRecipe:
    """Return a two-layer recipe of width 64 with the variant's changes."""
    sections: Changes = {
        "data": {"kind": "text", "sequence_length": 16},
        "masking": {"num_states_per_mask": K},
        "model": {
            "num_layers": 2, "num_heads": 4, "width": 64, "ffn_width": 256, "dropout": 0.0, "attention_dropout": 0.0,
            "max_length": 64,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 100, "schedule": "constant"},
        "train": {"max_steps": steps, "batch_sequences": variant.batch_sequences},
    }  # fmt: skip
    changed = {name: values | variant.changes.get(name, {}) for name, values in sections.items()}
    top = {"name": "study-collapse", "seed": seed} | variant.changes.get("", {})
    return PretrainRecipe.model_validate(top | changed)


def sentence_batches(recipe: PretrainRecipe) -> list[Batch]:
    """Return the sentence without a cue, with a good one and with a bad one."""
    batches = []
    for cue in CUES:
        ids = SENTENCE.copy()
        ids[CUE_POSITION] = cue
        k, objective = recipe.masking.num_states_per_mask, recipe.objective
        batch = batch_from_masked_ids(ids[None], mask_id=MASK, pad_id=PAD, num_states_per_mask=k, objective=objective)
        batches.append(batch)
    return batches


def pair_dag(model: ExlmModel, batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of the alignment op for pairs of words (P, 2); the sentence is encoded once."""
    nodes = model.node_states(batch)
    log_probs_SV = model.node_log_probs(nodes)[0]
    log_emit = torch.where(nodes.is_inner, log_probs_SV.t()[targets], torch.zeros(()))
    count, num_masks = targets.shape
    log_trans = model.log_transitions(nodes, batch).expand(count, -1, -1)
    return log_emit, log_trans, torch.full((count,), num_masks), batch.state_lengths.expand(count)


def pair_nll(model: ExlmModel, batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the nats of each pair (P,) and the (S, S) transitions of the sentence; None for an MLM."""
    if model.transition is None:
        log_probs_SV = model.node_log_probs(model.node_states(batch))[0]
        return -log_probs_SV[1:-1][torch.arange(targets.shape[1]), targets].sum(1), None
    dag = pair_dag(model, batch, targets)
    return states_alignment_nll(*dag), dag[1][0]


def regularisation(model: ExlmModel, log_trans_SS: Tensor, entropy_bonus: float) -> Tensor:
    """Return the penalty on uneven visits less the bonus on the mean entropy of the transitions out of a node."""
    log_rows = log_trans_SS[:-1]
    entropy = -(log_rows.exp() * log_rows.masked_fill(log_rows == -math.inf, 0.0)).sum(-1).mean()
    assert model.transition is not None
    return model.transition.balance_weight * state_imbalance(log_trans_SS[None], K)[0] - entropy_bonus * entropy


def train(variant: Variant, steps: int, seed: int) -> Outcome:
    """Train on new random pairs in each step, then measure on the sentence without a cue."""
    recipe = build_recipe(variant, steps, seed)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = ExlmModel(recipe, VOCABULARY)
    optimizer = build_optimizer(model, recipe.optim)
    batches = sentence_batches(recipe)
    began = time.perf_counter()
    for step in range(steps):
        is_bad = rng.integers(0, 2, variant.batch_sequences)
        targets = np.stack([first + 4 * is_bad + rng.integers(0, 4, len(is_bad)) for first in (FIRST, SECOND)], axis=1)
        has_cue = rng.random(len(is_bad)) < variant.cue_share
        cue = np.where(has_cue, 1 + is_bad, 0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.optim, steps)
        if model.transition is not None:
            model.transition.fade_balance(step / steps)
        optimizer.zero_grad()
        total: Tensor | float = 0.0
        for which in np.unique(cue):
            nll, log_trans = pair_nll(model, batches[which], torch.from_numpy(targets[cue == which]))
            total = total + nll.sum() / (2 * len(cue))
            if log_trans is not None:
                share = float((cue == which).mean())
                total = total + share * regularisation(model, log_trans, variant.entropy_bonus)
        assert isinstance(total, Tensor)
        total.backward()
        optimizer.step()
    return Outcome(*measure(model, batches[0]), time.perf_counter() - began)


@torch.no_grad()
def measure(model: ExlmModel, batch: Batch) -> tuple[float, float]:
    """Return expected nats per word, and effective states: the perplexity of the states of a word, mean over words."""
    model.eval()
    half = torch.arange(4)
    pairs = torch.cat([torch.cartesian_prod(FIRST + offset + half, SECOND + offset + half) for offset in (0, 4)])
    nats = float(pair_nll(model, batch, pairs)[0].double().mean()) / pairs.shape[1]
    if model.transition is None:
        return nats, 1.0
    posterior_BTS = alignment_posterior(*pair_dag(model, batch, pairs))
    return nats, float((-torch.xlogy(posterior_BTS, posterior_BTS).sum(-1)).exp().mean())


COLUMNS = ["variant", "seed", "steps", "nats_per_word", "captured_share", "effective_states", "wall_s", "commit"]


def rows_done(path: Path) -> set[tuple[str, str, str]]:
    """Return variant, seed and steps of the rows of a file."""
    if not path.is_file():
        return set()
    with path.open(newline="") as file:
        return {(row["variant"], row["seed"], row["steps"]) for row in csv.DictReader(file) if row["commit"]}


def main() -> None:
    """Run the chosen variants and add their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the variants and end")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "collapse.csv")
    options = parser.parse_args()
    if options.list:
        print(*VARIANTS, sep="\n")
        return
    commit = describe_environment().git_commit
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = rows_done(options.out)
    with options.out.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(COLUMNS)
        for name in options.variants:
            steps = options.steps * VARIANTS[name].steps_factor
            for seed in options.seeds:
                if (name, str(seed), str(steps)) in done:
                    continue
                outcome = train(VARIANTS[name], steps, seed)
                row = [name, seed, steps, f"{outcome.nll_nats:.4f}", f"{outcome.captured_share:.3f}"]
                writer.writerow([*row, f"{outcome.effective_states:.2f}", f"{outcome.wall_s:.0f}", commit])
                file.flush()
                print(f"{name} (seed {seed}): {outcome.captured_share:.0%} of the mutual information", flush=True)


if __name__ == "__main__":
    main()
