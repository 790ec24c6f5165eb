"""When does a DAG learn that two masked words depend on each other, and when does it collapse onto one path?

One sentence with two masked words that share a sentiment: eight words each, four good and four bad, equally likely.
The nats per word of a model that treats the masks alone cannot fall below ln 8 = 2.0794; the truth is
(ln 8 + ln 4) / 2 = 1.7329. The share of that gap that a model closes is that of the mutual information it captures.
Every variant is a recipe change that `exlm pretrain --set` takes. Writes a CSV row a variant and seed.

    python benchmarks/study_collapse.py --steps 2000 --out benchmarks/results/collapse.csv
"""

import argparse
import csv
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exlm_cli.config.recipes import PretrainRecipe
from exlm_cli.data.batch import Batch
from exlm_cli.data.expansion import batch_from_masked_ids
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.alignment import alignment_posterior, states_alignment_nll
from exlm_cli.run_dir import describe_environment
from exlm_cli.train.optim import build_optimizer, learning_rate

PAD, CLS, SEP, MASK = 0, 1, 2, 3
FIRST, SECOND = 20, 28
"""Each masked word is one of eight tokens: four good, then four bad."""
SENTENCE = np.array([CLS, 10, 11, MASK, 12, 13, 14, 15, MASK, 16, 17, 18, 19, SEP])
VOCABULARY = 40
K = 4
INDEPENDENCE_BOUND, TRUTH = math.log(8), (math.log(8) + math.log(4)) / 2

LANES = {"lane_bias": 4.0}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {},
    "lanes": {"model": {"transition": LANES}},
    "slow transitions": {"optim": {"transition_lr_scale": 0.03}},
    "clone vectors": {"model": {"clone_embedding": "nodes", "clone_init_std": 1.0}},
    "lanes + clone vectors": {"model": {"transition": LANES, "clone_embedding": "nodes", "clone_init_std": 1.0}},
    "lanes + slow transitions": {"model": {"transition": LANES}, "optim": {"transition_lr_scale": 0.03}},
    "clone vectors + slow transitions": {
        "model": {"clone_embedding": "nodes", "clone_init_std": 1.0},
        "optim": {"transition_lr_scale": 0.03},
    },
    "all three": {
        "model": {"transition": LANES, "clone_embedding": "nodes", "clone_init_std": 1.0},
        "optim": {"transition_lr_scale": 0.03},
    },
    "all three, clone vectors at the input": {
        "model": {"transition": LANES, "clone_embedding": "input", "clone_init_std": 1.0},
        "optim": {"transition_lr_scale": 0.03},
    },
    "all three, clone vectors of spread 0.2": {
        "model": {"transition": LANES, "clone_embedding": "nodes", "clone_init_std": 0.2},
        "optim": {"transition_lr_scale": 0.03},
    },
}


@dataclass(frozen=True)
class Outcome:
    """How one training run ended, over its last 500 steps."""

    nll_nats: float
    effective_states: float
    wall_s: float

    @property
    def captured_share(self) -> float:
        """Share of the mutual information between the two words."""
        return (INDEPENDENCE_BOUND - self.nll_nats) / (INDEPENDENCE_BOUND - TRUTH)


def build_recipe(variant: dict[str, dict[str, Any]], steps: int, lr: float, seed: int) -> PretrainRecipe:
    """Return a two-layer recipe of width 64 with the variant's changes."""
    model = {
        "num_layers": 2, "num_heads": 4, "width": 64, "ffn_width": 256, "dropout": 0.0, "attention_dropout": 0.0,
        "max_length": 64,
    }  # fmt: skip
    return PretrainRecipe.model_validate(
        {
            "name": "study-collapse",
            "seed": seed,
            "data": {"kind": "text", "sequence_length": 16},
            "masking": {"num_states_per_mask": K},
            "model": model | variant.get("model", {}),
            "optim": {"lr": lr, "warmup_steps": 100, "schedule": "constant"} | variant.get("optim", {}),
            "train": {"max_steps": steps, "batch_sequences": 128},
        }
    )


def pair_dag(model: ExlmModel, batch: Batch, targets_B2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of the alignment op for many pairs of words behind the one sentence, which is encoded once."""
    nodes = model.node_states(batch)
    log_probs_SV = model.node_log_probs(nodes)[0]
    log_emit = torch.where(nodes.is_inner, log_probs_SV.t()[targets_B2], torch.zeros(()))
    count = len(targets_B2)
    log_trans = model.log_transitions(nodes, batch).expand(count, -1, -1)
    return log_emit, log_trans, torch.full((count,), 2), batch.state_lengths.expand(count)


def train(recipe: PretrainRecipe, steps: int) -> Outcome:
    """Train on pairs drawn anew each step."""
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    model = ExlmModel(recipe, VOCABULARY)
    optimizer = build_optimizer(model, recipe.optim)
    batch = batch_from_masked_ids(SENTENCE, mask_id=MASK, pad_id=PAD, num_states_per_mask=K, objective="exlm")
    began, losses = time.perf_counter(), []
    for step in range(steps):
        is_bad = rng.integers(0, 2, recipe.train.batch_sequences)
        words = [first + 4 * is_bad + rng.integers(0, 4, len(is_bad)) for first in (FIRST, SECOND)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.optim, steps) * group["lr_scale"]
        optimizer.zero_grad()
        dag = pair_dag(model, batch, torch.from_numpy(np.stack(words, axis=1)))
        loss = states_alignment_nll(*dag).mean() / 2
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        every_pair = torch.cartesian_prod(torch.arange(FIRST, FIRST + 8), torch.arange(SECOND, SECOND + 8))
        posterior_BTS = alignment_posterior(*pair_dag(model, batch, every_pair))
    shares = posterior_BTS.sum(1)[:, 1:-1].mean(0).unflatten(0, (2, K))
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-9)
    effective = float((-torch.xlogy(shares, shares).sum(-1)).exp().mean())
    return Outcome(float(np.mean(losses[-500:])), effective, time.perf_counter() - began)


def main() -> None:
    """Run the variants asked for and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/collapse.csv"))
    options = parser.parse_args()
    environment = describe_environment()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "variant",
                "seed",
                "steps",
                "lr",
                "nats_per_word",
                "captured_share",
                "effective_states",
                "wall_s",
                "commit",
            ]
        )
        for name in options.variants:
            for seed in options.seeds:
                outcome = train(build_recipe(VARIANTS[name], options.steps, options.lr, seed), options.steps)
                row = [name, seed, options.steps, options.lr, f"{outcome.nll_nats:.4f}"]
                row += [f"{outcome.captured_share:.3f}", f"{outcome.effective_states:.2f}", f"{outcome.wall_s:.0f}"]
                writer.writerow([*row, environment["git_commit"]])
                file.flush()
                print(f"{name} (seed {seed}): {outcome.captured_share:.0%} of the mutual information", flush=True)


if __name__ == "__main__":
    main()
