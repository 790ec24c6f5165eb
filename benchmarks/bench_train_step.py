"""Benchmark of a training step: ExLM against its MLM twin, beside the ratio of their FLOPs (Table 12).

    python benchmarks/bench_train_step.py [--recipes text-small,smiles-small] [--steps 9] [--threads 1] [--quick]
    python benchmarks/bench_train_step.py --recipes ablation-exlm --device cuda --batch-share 0.0625
    python benchmarks/bench_train_step.py --recipes text-small --threads 1 --against hf --steps 15

It runs real steps of the training loop on generated token ids of the recipe's vocabulary and lengths: full sequences
for packed text, lengths of drug-like molecules in SMILES (log-normal, median 43) for one row per sequence. In every
round each model does one normal step and one step split into its parts (`step_split.py`), both models on the same
sequences and masks, so each ratio is of neighbouring steps of one run; the split step against the normal one gives the
cost of measuring. The floor counts FLOPs without padding (`config/describe.py`). Hours are for the recipe's steps
on this device, without validation and checkpoints. "data alone" is the time to make a step's batches and nothing else;
"data" is the part of it that the step waits for. `--against hf` times whole steps alone, beside those of transformers
(`against_hf.py`).
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

import against_hf
import harness
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch
from exlm_cli.data.corpus.prepare import PreparedData
from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, UNK, Tokenizer
from exlm_cli.ops.alignment import choose_backend
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import MetricsLog
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.pretrain import PretrainTask
from exlm_cli.train.pretrained import build_model
from exlm_cli.train.process import StopSignal
from step_measurements import ALONE, SPLIT, WHOLE, Measured, StepSize, conclude, mlm_twin, rows_of, show
from step_split import split_step

MEDIAN_SMILES_TOKENS, SPREAD_OF_LOG = 43, 0.42


class RecordingLoop(TrainingLoop):
    """Training loop that remembers the batches of its last step."""

    last_batches: list[Batch]

    def batches(self, indices: IntArray) -> Iterator[Batch]:
        """Yield the step's batches."""
        self.last_batches = []
        for batch in super().batches(indices):
            self.last_batches.append(batch)
            yield batch


@dataclass(frozen=True)
class Side:
    """One of the two models, with its training loop and measurements."""

    task: PretrainTask
    loop: RecordingLoop
    measured: Measured

    def last_size(self) -> StepSize:
        """Return the size of the last step."""
        batches = self.loop.last_batches
        return StepSize.of(self.measured.recipe, batches, sum(map(self.task.count_tokens, batches)))


def build_sides(name: str, arguments: argparse.Namespace, folder: Path) -> tuple[Side, Side]:
    """Return both models, set up on the same generated data."""
    overrides = [f"device={arguments.device.type}", f"train.alignment_backend={arguments.backend}", *arguments.set]
    exlm: PretrainRecipe = load_recipe(name, overrides)
    data = generate_data(scale_batch(exlm, arguments.batch_share), folder)
    return build_side(exlm, data, arguments, folder), build_side(mlm_twin(exlm), data, arguments, folder)


def build_side(recipe: PretrainRecipe, data: PreparedData, arguments: argparse.Namespace, folder: Path) -> Side:
    """Return a model of a recipe, set up for training."""
    device = arguments.device
    scaled = scale_batch(recipe, arguments.batch_share)
    model = build_model(scaled, data.tokenizer, device).train()
    task = PretrainTask(scaled, data, model, device)
    loop = RecordingLoop(
        task,
        scaled.train,
        scaled.optim,
        seed=scaled.seed,
        run=folder,
        metrics=MetricsLog(folder / "metrics.jsonl"),
        progress=SilentProgress(),
        resume_command="",
    )
    backend = "" if model.transition is None else choose_backend(arguments.backend, torch.float32, device)
    return Side(task, loop, Measured(recipe, arguments.batch_share, backend, task.precision))


def scale_batch(recipe: PretrainRecipe, share: float) -> PretrainRecipe:
    """Return the recipe with a share of the sequences or tokens of a step."""
    key = "batch_tokens" if recipe.train.batch_tokens is not None else "batch_sequences"
    size = max(1, round(share * getattr(recipe.train, key)))
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={key: size})})


def generate_data(recipe: PretrainRecipe, folder: Path) -> PreparedData:
    """Return uniform token ids of the vocabulary, as many sequences as one window of length buckets holds."""
    rng = np.random.default_rng(0)
    vocab_size, longest = recipe.tokenizer.vocab_size, recipe.data.sequence_length - 2
    is_packed = recipe.data.sample_break == "none"
    mean_length = longest if is_packed else MEDIAN_SMILES_TOKENS
    batch = recipe.train.batch_sequences or max(1, (recipe.train.batch_tokens or 0) // (mean_length + 2))
    count = batch * recipe.train.bucket_steps
    lengths = np.full(count, longest)
    if not is_packed:
        drawn = rng.lognormal(np.log(MEDIAN_SMILES_TOKENS), SPREAD_OF_LOG, count)
        lengths = drawn.astype(np.int64).clip(1, longest)
    with ShardWriter(folder / "shards", vocab_size, "generated") as writer:
        writer.add([rng.integers(len(SPECIAL_TOKENS), vocab_size, length).tolist() for length in lengths])
    words = (*SPECIAL_TOKENS, *(f"t{i}" for i in range(vocab_size - len(SPECIAL_TOKENS))))
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNK)), "smiles")
    dataset = TokenDataset(folder / "shards", vocab_size)
    return PreparedData(tokenizer, dataset, dataset, "generated", num_rejected=0, was_cached=False)


def measure_round(sides: list[Side]) -> None:
    """Measure one whole and one split step of each model."""
    stop = StopSignal()  # not entered, so that signals end the benchmark
    for side in sides:
        stopwatch = harness.Stopwatch(side.task.device)
        stopwatch.mark()
        side.loop.advance(stop)
        stopwatch.mark()
        side.measured.times_ms[WHOLE].append(stopwatch.laps_ms()[0])
        side.measured.sizes[WHOLE].append(side.last_size())
    for side in sides:
        with split_step(side.loop) as clock:
            side.loop.advance(stop)
        parts_ms = clock.totals_ms()
        parts_ms[SPLIT] = sum(ms for part, ms in parts_ms.items() if part.direction == "both")
        side.measured.sizes[SPLIT].append(side.last_size())
        indices = torch.cat([batch.sample_index for batch in side.loop.last_batches]).cpu().numpy()
        start_s = time.perf_counter()
        for _ in side.task.microbatches(indices, side.loop.state.epoch):
            pass
        parts_ms[ALONE] = 1000 * (time.perf_counter() - start_s)
        for part, ms in parts_ms.items():
            side.measured.times_ms[part].append(ms)


def measure(sides: list[Side], num_rounds: int, num_warmup: int) -> None:
    """Measure round by round; the models take turns to be first."""
    for round_index in range(num_warmup + num_rounds):
        if round_index == num_warmup:
            for side in sides:
                side.measured.forget()
        measure_round(sides[::-1] if round_index % 2 else sides)


def measure_against_hf(sides: tuple[Side, Side], num_rounds: int, num_warmup: int) -> list[dict[str, Any]]:
    """Measure whole steps of both models and of transformers, on the same sequences and masks."""
    exlm, mlm = sides
    stop = StopSignal()
    recipe, vocab_size = mlm.task.recipe, mlm.task.model.decoder_weight.shape[0]
    mlm.loop.advance(stop)  # for batches to begin with
    exlm.loop.advance(stop)
    steps = {"MLM": lambda: mlm.loop.advance(stop), "ExLM": lambda: exlm.loop.advance(stop)}
    for name, model in against_hf.build_theirs(recipe, vocab_size).items():
        step = against_hf.theirs_step(model.to(mlm.task.device), recipe)
        steps[name] = functools.partial(lambda step: step(mlm.loop.last_batches), step)
    finish = torch.cuda.synchronize if mlm.task.device.type == "cuda" else lambda: None
    times = against_hf.measure_turns(steps, num_rounds, num_warmup, finish)
    sizes = [side.last_size() for side in sides]
    floor = sizes[0].flops.total / sizes[1].flops.total
    return against_hf.rows_of(times, exlm.measured.recipe, sizes[1].num_tokens, floor)


def main() -> None:
    """Print tables and append their rows to `results/train_step.csv`."""
    parser = argparse.ArgumentParser(description="Time of a training step, ExLM against MLM")
    parser.add_argument("--recipes", default="text-small,smiles-small", help="comma-separated names of ExLM recipes")
    parser.add_argument("--steps", default=9, type=int, help="rounds measured, after --warmup")
    parser.add_argument("--warmup", default=2, type=int, help="rounds before those")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--threads", default=torch.get_num_threads(), type=int)
    parser.add_argument("--backend", default="auto", help="backend of the alignment: auto, native, reference")
    parser.add_argument("--batch-share", default=1.0, type=float, help="share of the recipe's batch in each step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for both recipes")
    parser.add_argument("--quick", action="store_true", help="three rounds, no rows written")
    parser.add_argument("--against", choices=["hf"], help="beside models of transformers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.recipes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            exlm, mlm = build_sides(name, arguments, Path(folder))
            num_rounds = 3 if arguments.quick else arguments.steps
            if arguments.against:
                rows = measure_against_hf((exlm, mlm), num_rounds, arguments.warmup)
                against_hf.show(rows)
                for row in () if arguments.quick else rows:
                    harness.append_row("against_hf", {**row, **harness.surroundings(arguments.device)})
                continue
            measure([exlm, mlm], num_rounds, arguments.warmup)
        exlm_rows, mlm_rows = rows_of(exlm.measured, mlm.measured), rows_of(mlm.measured, None)
        show(exlm_rows)
        show(mlm_rows)
        print(conclude(exlm_rows, mlm_rows), flush=True)
        if not arguments.quick:
            for row in exlm_rows + mlm_rows:
                harness.append_row("train_step", {**row, **harness.surroundings(arguments.device)})


if __name__ == "__main__":
    main()
