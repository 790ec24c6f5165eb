"""Benchmark of a training step: ExLM, its MLM twin and, on request, BERT and ModernBERT of transformers, turn by turn.

    python benchmarks/bench_train_step.py [--recipes text-small,smiles-small] [--steps 9] [--threads 1] [--quick]
    python benchmarks/bench_train_step.py --recipes ablation-exlm --device cuda --batch-share 0.0625
    python benchmarks/bench_train_step.py --recipes text-small --threads 1 --against hf --steps 15

It runs real steps of the training loop on generated token ids of the recipe's vocabulary and lengths: full sequences
for packed text, lengths of drug-like molecules in SMILES (log-normal, median 43) for one row per sequence. In every
round each model does one step, ours on the same sequences and masks, those of transformers on the batches of our MLM
(`against_hf.py`). A ratio is of two steps of one round; on a busy machine, read that of the processor time. The floor
is the ratio of FLOPs without padding. Where the time of a step goes is in the trace of `exlm pretrain --profile`.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

import against_hf
import harness
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.cost.counts import count_sequence_flops, recipe_step_flops
from exlm_cli.data.batch import Batch
from exlm_cli.data.corpus.prepare import PreparedData
from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, UNK, Tokenizer
from exlm_cli.ops.alignment import choose_backend
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import MetricsLog
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.pretrain_task import PretrainTask
from exlm_cli.train.pretrained import build_model
from exlm_cli.train.process import StopSignal

MEDIAN_SMILES_TOKENS, SPREAD_OF_LOG = 43, 0.42
PAPER_RATIO = 104.2 / 54.7
"""Hours of Table 12: k = 4, Table 5's settings, two A100 80G."""


class RecordingLoop(TrainingLoop):
    """Training loop that remembers the batches of its last step, and lengths and targets of all steps."""

    last_batches: list[Batch]
    lengths: list[list[tuple[Tensor, Tensor]]]

    def batches(self, made: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the step's batches."""
        self.last_batches = []
        self.lengths.append([])
        for batch in super().batches(made):
            self.last_batches.append(batch)
            self.lengths[-1].append((batch.lengths, batch.target_lengths))
            yield batch


@dataclass(frozen=True)
class Side:
    """One of our two models, with its training loop."""

    task: PretrainTask
    loop: RecordingLoop

    def step(self) -> None:
        """Do a step; signals end the benchmark."""
        self.loop.advance(StopSignal())

    def flops(self, num_steps: int) -> float:
        """Return the mean FLOPs of the last steps, without padding."""
        return fmean(
            sum(
                count_sequence_flops(self.task.recipe, length, num_targets).total
                for lengths, targets in of_step
                for length, num_targets in zip(lengths.tolist(), targets.tolist(), strict=True)
            )
            for of_step in self.loop.lengths[-num_steps:]
        )


def build_side(recipe: PretrainRecipe, data: PreparedData, device: torch.device, folder: Path) -> Side:
    """Return a model of a recipe, set up for training."""
    task = PretrainTask(recipe, data, build_model(recipe, data.tokenizer, device).train(), device)
    loop = RecordingLoop(
        task,
        recipe.train,
        recipe.optim,
        seed=recipe.seed,
        run=folder,
        metrics=MetricsLog(folder / "metrics.jsonl"),
        progress=SilentProgress(),
        resume_command="",
    )
    loop.lengths = []
    return Side(task, loop)


def mlm_twin(exlm: PretrainRecipe) -> PretrainRecipe:
    """Return the MLM with the same data, encoder and steps."""
    changes = {"objective": "mlm", "masking.num_states_per_mask": 1, "model.rope": "1d"}
    return exlm.changed({"name": f"{exlm.name}-mlm"} | changes)


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


def measure(name: str, arguments: argparse.Namespace, num_rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each model and each of ours that it is compared with; the MLM's own comes last."""
    device = arguments.device
    overrides = [f"device={device.type}", f"train.alignment_backend={arguments.backend}", *arguments.set]
    exlm_recipe = scale_batch(load_recipe(name, overrides), arguments.batch_share)
    data = generate_data(exlm_recipe, folder)
    exlm, mlm = (build_side(recipe, data, device, folder) for recipe in (exlm_recipe, mlm_twin(exlm_recipe)))
    sides = {"ExLM": exlm, "MLM": mlm}
    mlm.step()  # for batches to begin with
    exlm.step()
    steps: dict[str, Callable[[], object]] = {}
    if arguments.against:
        against_hf.assert_same_targets(mlm.loop.last_batches, data.tokenizer.mask_id)
        for model, theirs in against_hf.build_theirs(exlm_recipe, exlm_recipe.tokenizer.vocab_size).items():
            step = against_hf.theirs_step(theirs.to(device), mlm.task.recipe)
            steps[model] = functools.partial(lambda step: step(mlm.loop.last_batches), step)
    steps |= {model: side.step for model, side in sides.items()}
    times = harness.measure_turns(steps, num_rounds, arguments.warmup, device)
    flops = {model: side.flops(num_rounds) for model, side in sides.items()}
    pairs = [
        (model, over) for model in steps for over in sides if model not in sides or (model, over) == ("ExLM", "MLM")
    ]
    return [
        {
            "recipe": name,
            "model": model,
            "over": over or "",
            "tokens": sum(mlm.task.count_tokens(batch) for batch in mlm.loop.last_batches),
            "batch_share": arguments.batch_share,
            "precision": mlm.task.precision,
            "compile": exlm_recipe.train.compile,
            "alignment": choose_backend(arguments.backend, torch.float32, device),
            "rounds": num_rounds,
            **compare(times, flops, model, over),
        }
        for model, over in (*pairs, ("MLM", None))
    ]


def compare(
    times: dict[str, harness.Times], flops: dict[str, float], model: str, over: str | None
) -> dict[str, float | str]:
    """Return the columns of a model's times, and of their ratios to those of another, empty where there is none."""
    elapsed = harness.Spread.of(times[model].elapsed)
    columns: dict[str, float | str] = {
        **elapsed.columns_ms(2),
        "processor_ms": round(harness.Spread.of(times[model].processor).median, 2),
        "tflop_per_s": round(flops[model] / elapsed.median / 1e9, 4) if model in flops else "",
    }
    for kind in ("elapsed", "processor"):
        columns |= dict.fromkeys((f"{kind}_ratio", f"{kind}_ratio_p20", f"{kind}_ratio_p80"), "")
        if over is not None:
            ratio = harness.Spread.of_ratio(getattr(times[model], kind), getattr(times[over], kind))
            columns |= {f"{kind}_ratio": round(ratio.median, 3)}
            columns |= {f"{kind}_ratio_{name}": round(getattr(ratio, name), 3) for name in ("p20", "p80")}
    columns["floor"] = round(flops[model] / flops[over], 3) if model in flops and over is not None else ""
    return columns


def show(rows: list[dict[str, Any]]) -> None:
    """Print times and ratios."""
    first = rows[0]
    print(f"\n{first['recipe']}: {first['tokens']:,} tokens a step, {first['precision']}, {first['rounds']} rounds")
    head = "".join(f"{kind:>13} ms{'ratio, p20 to p80':>22}" for kind in ("elapsed", "processor"))
    print(f"{'':<19}{head}{'TFLOP/s':>9}{'floor':>7}")
    for row in rows:
        line = f"{row['model']:<10} / {row['over']:<6}" if row["over"] else f"{row['model']:<19}"
        for kind, time_ms in (("elapsed", row["median_ms"]), ("processor", row["processor_ms"])):
            ratio = f"{row[f'{kind}_ratio']}  {row[f'{kind}_ratio_p20']} to {row[f'{kind}_ratio_p80']}"
            line += f"{time_ms:>16.1f}{ratio if row['over'] else '':>22}"
        print(f"{line}{row['tflop_per_s']:>9}{row['floor']:>7}")


def main() -> None:
    """Print tables and append their rows to `steps.csv`."""
    parser = argparse.ArgumentParser(description="Time of a training step, ExLM against MLM")
    parser.add_argument("--recipes", default="text-small,smiles-small", help="comma-separated names of ExLM recipes")
    parser.add_argument("--steps", default=9, type=int, help="rounds measured, after --warmup")
    parser.add_argument("--warmup", default=2, type=int, help="rounds before those")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--threads", default=torch.get_num_threads(), type=int)
    parser.add_argument("--backend", default="auto", help="backend of the alignment: auto, native, reference")
    parser.add_argument("--batch-share", default=1.0, type=float, help="share of the recipe's batch in each step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for both recipes")
    parser.add_argument("--against", choices=["hf"], help="beside models of transformers")
    parser.add_argument("--out", type=Path, help="folder of the rows; default: results/")
    parser.add_argument("--quick", action="store_true", help="three rounds, no rows written")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.recipes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(name, arguments, 3 if arguments.quick else arguments.steps, Path(folder))
        show(rows)
        for row in () if arguments.quick else rows:
            harness.append_row("steps", {**row, **harness.surroundings(arguments.device)}, arguments.out)
    of_paper = load_recipe("ablation-exlm")
    floor = recipe_step_flops(of_paper).total / recipe_step_flops(mlm_twin(of_paper)).total
    print(f"\nTable 12 of the paper, ExLM / MLM (`ablation-exlm`, two A100): {PAPER_RATIO:.2f}, floor {floor:.2f}")


if __name__ == "__main__":
    main()
