"""Benchmark of the data path: the batches of a training step.

    python benchmarks/bench_data.py [--recipes smiles-base,text-base] [--set KEY=VALUE]... [--rounds 9] [--quick]

The batches of a step are masked, cut into microbatches, expanded and padded, on generated token ids
(`bench_train_step.py` describes them), and nothing else: an accelerator that needs less time than this for a step
waits. The first sequences are compared with the same sequences batched alone. `cpu_ms` is the processor time of all
threads, which other work on the machine changes least.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

import harness
from bench_train_step import generate_data
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.sampler import EpochPlan, Feed, plan_epoch

STEPS_PER_WINDOW = 4
CPU = torch.device("cpu")


def measure_steps(name: str, settings: Sequence[str], num_rounds: int) -> dict[str, object]:
    """Return a row with the time to make the batches of one step of a recipe."""
    recipe: PretrainRecipe = load_recipe(name, [f"train.bucket_steps={STEPS_PER_WINDOW}", *settings])
    with tempfile.TemporaryDirectory() as folder:
        data = generate_data(recipe, Path(folder))
        feed = Feed(data.train, recipe, data.tokenizer, epoch=0)
        lengths = data.train.lengths + 2
        plan = plan_of(recipe, lengths)
        check_batches(feed, plan[0])
        times_ms, cpu_ms, tokens, microbatches = [], [], [], []
        for round_index, step in itertools.product(range(1 + num_rounds), range(len(plan))):
            indices = plan[step]
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            num_batches = sum(1 for _ in feed.microbatches(indices, CPU))
            if round_index:  # the first one warms up
                times_ms.append(1000 * (time.perf_counter() - start_s))
                cpu_ms.append(1000 * (time.process_time() - start_cpu_s))
                tokens.append(int(lengths[indices].sum()))
                microbatches.append(num_batches)
    return {
        "recipe": " ".join([name, *settings]),
        "tokens": round(sum(tokens) / len(tokens)),
        "microbatches": round(sum(microbatches) / len(microbatches), 1),
        **harness.Spread.of(times_ms).columns_ms(2),
        "cpu_ms": round(harness.Spread.of(cpu_ms).median, 2),
        "tokens_per_s": round(sum(tokens) / sum(times_ms) * 1000),
        "steps": len(times_ms),
    }


def plan_of(recipe: PretrainRecipe, lengths: np.ndarray) -> EpochPlan:
    """Return the steps of an epoch, as training has them."""
    train = recipe.train
    return plan_epoch(
        lengths,
        seed=recipe.seed,
        epoch=0,
        batch_sequences=train.batch_sequences,
        batch_tokens=train.batch_tokens,
        bucket_steps=train.bucket_steps,
    )


def check_batches(feed: Feed, indices: np.ndarray) -> None:
    """Assert that some sequences of a step are the same in its first batch and alone."""
    batch = next(feed.microbatches(indices, CPU))
    for b, index in enumerate(batch.sample_index[:20].tolist()):
        alone = feed.batch(np.array([index]))
        for field in fields(batch)[:10]:  # those with an axis of sequences
            if getattr(batch, field.name) is None:  # positions, where no mask expands in the input
                continue
            together, itself = getattr(batch, field.name)[b], getattr(alone, field.name)[0]
            assert torch.equal(together[: len(itself)] if itself.ndim else together, itself), field.name


def main() -> None:
    """Print a line for each recipe and append its row to `results/data.csv`."""
    parser = argparse.ArgumentParser(description="Time to make the batches of a training step")
    parser.add_argument("--recipes", default="smiles-base,text-base", help="comma-separated names")
    parser.add_argument("--set", default=[], action="append", dest="settings", help="KEY=VALUE of the recipe")
    parser.add_argument("--rounds", default=9, type=int, help="passes over four steps, after one to warm up")
    parser.add_argument("--quick", action="store_true", help="one pass, no rows written")
    arguments = parser.parse_args()
    for name in arguments.recipes.split(","):
        row = measure_steps(name, arguments.settings, 1 if arguments.quick else arguments.rounds)
        print(
            f"{name}: {row['tokens']:,} tokens in {row['microbatches']} microbatches: {row['median_ms']} ms "
            f"({row['p20_ms']} to {row['p80_ms']}), {row['cpu_ms']} ms CPU, {row['tokens_per_s']:,} tokens/s",
            flush=True,
        )
        if not arguments.quick:
            harness.append_row("data", {**row, **harness.surroundings(CPU)})


if __name__ == "__main__":
    main()
