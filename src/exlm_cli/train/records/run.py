"""How a pre-training begins, told in messages and recorded in its directory: on what it trains, and what the model and
the frequencies of tokens know before the first step.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exlm_cli.config.input_paths import write_run_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.cost.meter import num_parameters
from exlm_cli.data.corpus.prepare import PreparedData, list_rejected
from exlm_cli.data.sampler import Feed
from exlm_cli.data.tokenizer import TOKENIZER_FILE
from exlm_cli.files import finite_or_none
from exlm_cli.format import format_number_of, format_parameters, format_percent
from exlm_cli.ops.alignment import choose_backend
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import RunInfo, update_run_json
from exlm_cli.train.evaluation import measure_own_mask_shares
from exlm_cli.train.pretrain_task import VALIDATION_EPOCH, PretrainTask, validation_indices
from exlm_cli.train.pretrained import describe_device
from exlm_cli.train.records.unigrams import UnigramScores, score_unigrams, token_log_probs
from exlm_cli.train.task import LoopResult

CENTRED_SHARE = 0.9
"""Own-mask share from which a DAG counts as centred on its targets."""

_OWN_MASK_SEQUENCES = 256


def tell_beginning(task: PretrainTask, run: Path, before: RunInfo | None, progress: Progress) -> None:
    """Tell what is trained on what, and whether a resumed run, described by `before`, now trains otherwise."""
    shown_ranks = "" if task.ranks.size == 1 else f", {task.ranks.size} ranks"
    progress.message(
        f"{task.recipe.name}: {format_parameters(num_parameters(task.model))} parameters, "
        f"{format_number_of(len(task.train_set), 'sequence')}, {task.train_set.num_tokens:,} tokens, "
        f"on {describe_device(task.device)}{shown_ranks}; results in {run}"
    )
    if before is not None and before.precision not in (None, task.precision):
        progress.message(
            f"note: the run was trained in {before.precision} until now, and in {task.precision} from here"
        )


def record_beginning(
    run: Path, task: PretrainTask, data: PreparedData, fields: Mapping[str, Any], *, step: int, progress: Progress
) -> UnigramScores:
    """Write what a resumption needs, and `run.json` with measurements of the start; return those of the frequencies.

    A run whose checkpoint refuses the recipe or the data must stay unchanged: this comes after `TrainingLoop.resume`.

    Args:
        fields: Further fields of `run.json`.
        step: Finished steps; the own-mask share is measured before the first.
    """
    ranks, described = task.ranks, {**fields}
    if task.model.transition is not None:
        backend = task.recipe.train.alignment_backend
        # the native backend may have to be built: before the first step
        described["alignment_backend"] = ranks.rank_0_first(lambda: choose_backend(backend, torch.float32, task.device))
        if step == 0:
            share = described["own_mask_share"] = own_mask_share(task)
            if share < CENTRED_SHARE:
                progress.message(_describe_start(share))
    unigrams = ranks.on_rank_0(lambda: unigram_scores(task))
    described |= {
        "command": "pretrain",
        "seed": task.recipe.seed,
        "device": describe_device(task.device),
        "precision": task.precision,
        "num_ranks": ranks.size if ranks.size > 1 else None,
        "unigram_loss": finite_or_none(unigrams.loss),
        "unigram_accuracy": finite_or_none(unigrams.accuracy),
    }
    ranks.on_rank_0(functools.partial(_write, run, task.recipe, data, described, progress))
    return unigrams


def record_end(run: Path, task: PretrainTask, result: LoopResult) -> None:
    """Write what became of a run to `run.json`."""
    if task.ranks.is_first:
        seconds = round(result.state.elapsed_s, 1)
        found = {"parameters": num_parameters(task.model), "steps": result.state.step, "train_time_s": seconds}
        update_run_json(run, found)


def own_mask_share(task: PretrainTask) -> float:
    """Return the own-mask share of the model as it is now: the mean over at most 256 validation sequences."""
    indices = validation_indices(task.valid_set, _OWN_MASK_SEQUENCES)
    measure = functools.partial(measure_own_mask_shares, backend=task.objective.backend)
    measured = task.measure(task.valid_set, indices, measure, SilentProgress())
    shares = [share for row in measured for share in row]
    # the same sum for any number of ranks; sequences without masks have no share
    return math.fsum(shares) / max(1, len(shares))


def unigram_scores(task: PretrainTask) -> UnigramScores:
    """Return what the frequencies of training tokens reach on the targets of a validation."""
    indices = validation_indices(task.valid_set, task.recipe.train.validation_sequences)
    feed = Feed(task.valid_set, task.recipe, task.tokenizer, VALIDATION_EPOCH)
    batches = feed.microbatches(indices, torch.device("cpu")) if len(indices) else ()
    return score_unigrams(token_log_probs(task.train_set, task.tokenizer.vocab_size), batches)


def _describe_start(share: float) -> str:
    """Return the message of a run whose DAG does not begin centred."""
    return (
        f"note: at the start of training, {format_percent(share)} of what a mask learns is its own token, and the rest "
        "those of other masks; `--set model.transition.start=next_mask` and `--set model.transition.start_strength=4` "
        "change that"
    )


def _write(
    run: Path, recipe: PretrainRecipe, data: PreparedData, described: Mapping[str, Any], progress: Progress
) -> None:
    list_rejected(data, run / "rejected.csv", progress)
    data.tokenizer.save(run / TOKENIZER_FILE)
    of_data = {
        "data_fingerprint": data.fingerprint,
        "num_rejected_rows": data.num_rejected,
        "train_sequences": len(data.train),
        "train_tokens": data.train.num_tokens,
        "valid_sequences": len(data.valid),
    }
    update_run_json(run, {**described, **of_data})
    write_run_recipe(run, recipe)
