"""A pre-training run that was never trained, and tasks made of a few words, for the tests of fine-tuning."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import dump_recipe
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.finetune.predictions import read_rows, read_seed_predictions
from exlm_cli.finetune.results import FinetunedRun, read_results
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics, update_run_json
from exlm_cli.tasks.base import (
    DownstreamTask,
    EncodedSplit,
    FloatArray,
    SeedOutputs,
    Split,
    SplitIndices,
)
from exlm_cli.train.checkpoint import CheckpointState, LoopState, save_checkpoint
from exlm_cli.train.optim import build_optimizer
from exlm_cli.train.pretrained import model_identity
from exlm_cli.train.task import Callback
from tests.tiny import tiny_recipe

WORDS = ["amber", "birch", "cedar", "daisy", "elder", "fern"]
ONE_EPOCH: dict[str, Any] = {"seeds": [1], "train": {"max_epochs": 1}}


def make_pretrained(run: Path, tokenizer: Tokenizer | None = None, **sections: Any) -> Path:
    """Write a run of `exlm pretrain` at step 3 with weights as they were drawn; none: a tokenizer of the words."""
    run.mkdir(parents=True)
    recipe = tiny_recipe(**{"data": {"sequence_length": 24}, "model": {"num_layers": 1}, **sections})
    tokenizer = tokenizer or train_bpe([" " + " ".join(WORDS)] * 4, 400, 1, SilentProgress())
    tokenizer.save(run / "tokenizer.json")
    (run / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    update_run_json(run, {"command": "pretrain"})
    torch.manual_seed(0)
    model = ExlmModel(recipe, tokenizer.vocab_size)
    loop = LoopState()
    loop.step, loop.num_tokens = 3, 288
    state = CheckpointState(loop=loop, identity=model_identity(recipe, tokenizer), validation={})
    save_checkpoint(run, 3, model, build_optimizer(model, recipe.optim), state, keep_last=1, resume_command="")
    return run


def sign(checkpoint: Path) -> None:
    """Let the hashes of a checkpoint fit what is there now."""
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def finetune_recipe(**sections: Any) -> FinetuneRecipe:
    """Return a recipe of a few small epochs; keyword arguments replace top-level values or update sections."""
    content: dict[str, Any] = {
        "name": "tiny",
        "seeds": [1, 2],
        "device": "cpu",
        "task": {"name": "csv", "text_column": "text"},
        "model": {"dropout": 0.1, "attention_dropout": 0.1, "pooler_dropout": 0.1},
        "optim": {"lr": 3e-3, "warmup_ratio": 0.1},
        "train": {"max_epochs": 3, "batch_sequences": 8, "microbatch_tokens": 128, "num_threads": 1},
    }
    for key, value in sections.items():
        is_update = isinstance(value, dict) and key in content and "name" not in value
        content[key] = {**content[key], **value} if is_update else value
    return FinetuneRecipe.model_validate(content)


class WordTask(DownstreamTask):
    """Sentences of four words: has amber; has birch, which is missing in every third row."""

    name, loss, output_names, selection_metric = "words", "binary", ("amber", "birch"), "accuracy"
    split_name, notes = "random", ("a note",)

    def __init__(self, sizes: Sequence[int] = (24, 12, 12), seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.splits: tuple[Split, ...] = ("train", "valid", "test")[: len(sizes)]
        self.sentences = {
            split: [[WORDS[i] for i in rng.integers(len(WORDS), size=4)] for _ in range(size)]
            for split, size in zip(self.splits, sizes, strict=True)
        }
        self.scored: list[Split] = []
        self.targets: dict[Split, FloatArray] = {}

    @property
    def split_indices(self) -> SplitIndices:
        starts = np.cumsum([0, *map(len, self.sentences.values())])
        return {s: np.arange(len(self.sentences[s])) + starts[i] for i, s in enumerate(self.splits)}

    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> "EncodedWords":
        sentences, token_ids = self.sentences[split], []
        for words in sentences:
            inner = [i for word in words for i in tokenizer.encode(" " + word)][: sequence_length - 2]
            token_ids.append(np.array([tokenizer.cls_id, *inner, tokenizer.sep_id], dtype=np.int64))
        has_NC = np.array([["amber" in words, "birch" in words] for words in sentences], dtype=float)
        has_NC[::3, 1] = np.nan
        self.targets[split] = has_NC
        return EncodedWords(tuple(token_ids), has_NC, task=self, split=split)

    def score(self, split: Split, predicted: FloatArray) -> dict[str, float]:
        self.scored.append(split)
        targets = self.targets[split]
        return {"accuracy": float(((predicted > 0.5) == targets)[~np.isnan(targets)].mean())}


@dataclass(frozen=True, kw_only=True)
class EncodedWords(EncodedSplit):
    """Sentences of one split, scored for one seed."""

    task: WordTask
    split: Split

    def score(self, outputs: SeedOutputs, is_scored_N: NDArray[np.bool_] | None = None) -> dict[str, float]:
        return self.task.score(self.split, np.mean(outputs, axis=0))

    def prediction_columns(self, outputs: SeedOutputs) -> dict[str, list[str]]:
        return {}  # no test predicts files of words


def run_tiny(
    pretrained: Path,
    out: Path,
    task: WordTask | None = None,
    callbacks: Sequence[Callback] = (),
    **sections: Any,
) -> FinetunedRun:
    """Fine-tune the word task, or another one, with `finetune_recipe(**sections)`."""
    recipe = finetune_recipe(**sections)
    return run_finetuning(recipe, checkpoint=pretrained, out=out, task=task or WordTask(), callbacks=callbacks)


def grow_little(patch: pytest.MonkeyPatch, num_trees: int = 8, num_rounds: int = 8) -> None:
    """Let forests and boosting have few trees: those of a run take seconds."""
    patch.setattr("exlm_cli.finetune.baselines.baseline.NUM_TREES", num_trees)
    patch.setattr("exlm_cli.finetune.baselines.boosting.NUM_ROUNDS", num_rounds)


def cells(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.rglob("result.json"))]


def weights(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {str(p.relative_to(run)): load_file(p) for p in sorted(run.rglob("model.safetensors"))}


TIMES = ("elapsed_s", "tokens_per_s", "outside_model_share", "data_wait_s", "peak_memory_bytes")


def untimed(content: Any) -> Any:
    """Return JSON without what a clock or the memory of the machine decides."""
    if isinstance(content, dict):
        return {key: untimed(value) for key, value in content.items() if key not in TIMES}
    return [untimed(value) for value in content] if isinstance(content, list) else content


def assert_same_run(mine: Path, theirs: Path) -> None:
    """Weights bit by bit, results, curves and predictions; times apart."""
    one, other = weights(mine), weights(theirs)
    assert one.keys() == other.keys()
    for name in one:
        assert all(torch.equal(one[name][key], other[name][key]) for key in one[name]), name
    assert untimed(cells(mine)) == untimed(cells(theirs))
    assert untimed(read_results(mine).as_json()) == untimed(read_results(theirs).as_json())
    for path in [*theirs.rglob("*.parquet"), *theirs.rglob("predictions-*.csv"), *theirs.rglob("metrics.jsonl")]:
        own = mine / path.relative_to(theirs)
        if path.suffix != ".jsonl":
            assert own.read_bytes() == path.read_bytes()
        else:
            assert untimed(read_metrics(own)) == untimed(read_metrics(path))


def read_part(run: Path, part: Split, baseline: str | None = None) -> tuple[list[int], FloatArray, FloatArray]:
    """Return rows, (K, N, C) predictions of the seeds and targets of a part, as they are in a run's files."""
    results = read_results(run)
    rows = read_rows(run, results.loss, results.output_names)[results.split_seeds[0]][part]
    by_seed_KNC = read_seed_predictions(run, results, {part: rows.rows}, baseline=baseline)[part]
    return rows.rows.tolist(), by_seed_KNC, rows.targets


def words_table(folder: Path) -> dict[str, Any]:
    rows = [f"{a} {b},{int('amber' in (a, b))}" for a in WORDS for b in WORDS] * 2
    path = folder / "words.csv"
    path.write_text("text,amber\n" + "\n".join(rows[:60]) + "\n")
    return {"name": "csv", "text_column": "text", "label_columns": ["amber"], "files": {"train": str(path)}}
