"""One cell of a sweep: pre-train, measure, fine-tune. What an earlier process finished is kept.

`<cell>/pretrain/` is a run directory of its own, `measured.json` holds its figures, `finetune/<task>/` is a run for
each task, and `result.json`, written last and whole, marks the cell as done.
"""

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exlm_cli.config.base import identity_of, identity_values
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import load_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import MaskingConfig
from exlm_cli.config.sweep import SweepCell
from exlm_cli.data import IntArray
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.data.masking import Masker, Sequences
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import CheckpointError, DivergedError
from exlm_cli.experiments.evaluate import measure_entropy
from exlm_cli.experiments.results import (
    MEASURED_FILE,
    RESULT_FILE,
    Corruption,
    DivergedTask,
    EntropyAt,
    SweepCellResult,
    TaskScores,
    read_cell_file,
)
from exlm_cli.files import write_json
from exlm_cli.progress import Bar, Progress
from exlm_cli.run_dir import read_run_json
from exlm_cli.train.pretrain import run_pretraining, validation_indices

_COUNTED_SEQUENCES = 2048
"""Training sequences in which corrupted tokens are counted, evenly spread, under the masks of the first epoch."""


def run_cell(cell: SweepCell, folder: Path, progress: Progress) -> SweepCellResult:
    """Finish a cell and return its result, which keeps scores of tasks that the cell no longer has.

    Training that diverges ends the cell, not the sweep: the result says so in `diverged`, or in place of
    the scores of a task where fine-tuning diverged. With the same recipe it is not tried again.

    Args:
        folder: Its folder, made where there is none. No other process may work in it.

    Raises:
        CheckpointError: The folder was filled with another recipe.
        ExlmError: Whatever stops training, interruption included; running the cell again continues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_changed_cell(cell, folder)
    with progress.bar("trainings", 1 + len(cell.finetune)) as bar:
        try:
            measured = _pretrain_and_measure(cell, folder, progress)
        except DivergedError as error:
            corruption = _count(cell.pretrain, progress)
            result = SweepCellResult(**_described(cell), corruption=corruption, diverged=error.message)
        else:
            kept = _finetuned_before(folder, measured)
            result = measured.model_copy(update={"finetune": kept | _finetune(cell, folder, kept, bar, progress)})
    write_json(folder / RESULT_FILE, result)
    return result


def read_result(cell: SweepCell, folder: Path) -> SweepCellResult | None:
    """Return the result of a finished cell; None where something of the cell is still to be done.

    Raises:
        CheckpointError: It belongs to another recipe, or is damaged.
    """
    result = read_cell_file(folder / RESULT_FILE, SweepCellResult)
    if result is None:
        return None
    if result.pretrain_identity != identity_of(cell.pretrain):
        raise _other_recipe(folder, "trained")
    if result.diverged is not None:
        return result
    done = {task: scores.identity for task, scores in result.finetune.items()}
    wanted = {recipe.task.name: identity_of(recipe) for recipe in cell.finetune}
    return result if wanted.items() <= done.items() and _is_measured(cell, result) else None


def refuse_changed_cell(cell: SweepCell, folder: Path) -> None:
    """Refuse to continue a cell that was begun with another recipe.

    Raises:
        CheckpointError: It was; fine-tuning that diverged may be begun again with another recipe.
    """
    if changes := _changes_since_begun(folder / "pretrain", cell.pretrain):
        raise _other_recipe(folder, "trained", changes)
    result = read_cell_file(folder / RESULT_FILE, SweepCellResult)
    diverged = result.diverged_tasks if result is not None else []
    for recipe in cell.finetune:
        changes = _changes_since_begun(_finetune_folder(folder, recipe), recipe)
        if changes and recipe.task.name not in diverged:
            raise _other_recipe(folder, "fine-tuned", changes)


def _described(cell: SweepCell) -> dict[str, Any]:
    """Return the fields of a result that are known before training."""
    return {
        "label": cell.label,
        "seed": cell.seed,
        **dict(cell.description),
        "pretrain_identity": identity_of(cell.pretrain),
    }


def _pretrain_and_measure(cell: SweepCell, folder: Path, progress: Progress) -> SweepCellResult:
    """Return the result of a cell without fine-tuning."""
    measured = read_cell_file(folder / MEASURED_FILE, SweepCellResult)
    if measured is not None and _is_measured(cell, measured):
        return measured.model_copy(update=_described(cell))
    run = folder / "pretrain"
    out, resume = _out_or_resume(run)
    trained = run_pretraining(cell.pretrain, out=out, resume=resume, progress=progress)
    ratios = (cell.pretrain.masking.mask_ratio, *cell.entropy_ratios)
    entropies = measure_entropy(
        run,
        mask_ratios=tuple(dict.fromkeys(ratios)),
        max_sequences=cell.measure_sequences,
        device=cell.pretrain.device,
    )
    parameters = read_run_json(run).parameters
    assert parameters is not None, "a finished run has counted them"
    measured = SweepCellResult(
        **_described(cell),
        measure_sequences=cell.measure_sequences,
        steps=trained.steps,
        elapsed_s=trained.elapsed_s,
        parameters=parameters,
        corruption=_count(cell.pretrain, progress),
        metrics=entropies[0].metrics,
        entropy=tuple(EntropyAt(**entropy.model_dump(exclude={"metrics"})) for entropy in entropies),
        finetune={},
    )
    write_json(folder / MEASURED_FILE, measured)
    return measured


def _is_measured(cell: SweepCell, result: SweepCellResult) -> bool:
    """Return whether a result has the figures of this cell: its recipe, number of sequences and mask ratios."""
    return (
        result.pretrain_identity == identity_of(cell.pretrain)
        and result.measure_sequences == cell.measure_sequences
        and set(cell.entropy_ratios) <= {entropy.mask_ratio for entropy in result.entropy}
    )


def _count(recipe: PretrainRecipe, progress: Progress) -> Corruption | None:
    """Count corrupted tokens; None unless masks are drawn token by token, as the law of App. C assumes."""
    if recipe.masking.scheme != "bernoulli":
        return None
    data = prepare_data(recipe, progress=progress)
    indices = validation_indices(data.train, _COUNTED_SEQUENCES)
    sequences = ((int(index), data.train[int(index)]) for index in indices)
    return count_corrupted(sequences, recipe.masking, data.tokenizer, seed=recipe.seed)


def count_corrupted(
    sequences: Iterable[tuple[int, IntArray]], masking: MaskingConfig, tokenizer: Tokenizer, *, seed: int
) -> Corruption:
    """Mask sequences as training does and count the tokens that lost every copy.

    Args:
        sequences: (sample index, (n,) tokens without [CLS] and the last [SEP]).
        masking: Section of the recipe; the law holds for `scheme: bernoulli`.
        tokenizer: Its special tokens inside a sequence are not counted.
        seed: Selects the masks, which are those of the first epoch.
    """
    ratio, repeats = masking.mask_ratio, masking.num_repeats
    num_tokens, num_corrupted, num_forced = 0, 0, 0.0
    masker, is_ordinary = Masker(masking, tokenizer, seed, 0), tokenizer.is_ordinary
    for index, token_ids in sequences:
        masked = masker.mask(Sequences(token_ids[None], np.array([len(token_ids)]), np.array([index])))
        masked_copies = np.bincount(masked.target_source, minlength=len(token_ids) + 1)
        num_corrupted += int((masked_copies == repeats).sum())
        num_maskable = int(is_ordinary[token_ids].sum())
        num_tokens += num_maskable
        if repeats == 1 and num_maskable:
            num_forced += (1 - ratio) ** num_maskable
    law, divisor = ratio**repeats, max(1, num_tokens)
    return Corruption(
        num_tokens=num_tokens,
        num_corrupted=num_corrupted,
        expected=law,
        expected_with_floor=law + num_forced / divisor,
        measured=num_corrupted / divisor,
        standard_error=math.sqrt(law * (1 - law) / divisor),
    )


def _finetune(
    cell: SweepCell, folder: Path, done: Mapping[str, TaskScores | DivergedTask], bar: Bar, progress: Progress
) -> dict[str, TaskScores | DivergedTask]:
    """Fine-tune on every task that is not done with the same recipe, and return the scores of each."""
    scored: dict[str, TaskScores | DivergedTask] = {}
    for number, recipe in enumerate(cell.finetune, start=1):
        bar.update(number)
        if recipe.task.name in done and done[recipe.task.name].identity == identity_of(recipe):
            continue
        # importing it takes seconds, in every process
        from exlm_cli.finetune.run import run_finetuning

        run = _finetune_folder(folder, recipe)
        if _changes_since_begun(run, recipe):
            shutil.rmtree(run)  # diverged with another recipe
        out, resume = _out_or_resume(run)
        try:
            begun = run_finetuning(recipe, checkpoint=folder / "pretrain", out=out, resume=resume, progress=progress)
        except DivergedError as error:
            scored[recipe.task.name] = DivergedTask(identity=identity_of(recipe), diverged=error.message)
        else:
            scored[recipe.task.name] = TaskScores.of_run(identity_of(recipe), begun.results, begun.scores)
    return scored


def _finetuned_before(folder: Path, measured: SweepCellResult) -> dict[str, TaskScores | DivergedTask]:
    """Return the scores of a result that was written for the same pre-training."""
    before = read_cell_file(folder / RESULT_FILE, SweepCellResult)
    return before.finetune if before is not None and before.pretrain_identity == measured.pretrain_identity else {}


def _out_or_resume(run: Path) -> tuple[Path | None, Path | None]:
    """Return `out` and `resume` of a training in a folder: a new run where there is none yet."""
    return (None, run) if (run / "recipe.yaml").is_file() else (run, None)


def _changes_since_begun(run: Path, recipe: PretrainRecipe | FinetuneRecipe) -> str:
    """Describe the changes of a recipe since a run began; empty if it has not begun."""
    if not (run / "recipe.yaml").is_file():
        return ""
    both = load_recipe(run / "recipe.yaml", kind=type(recipe)), recipe
    return describe_changes(*(identity_values(with_absolute_paths(one)) for one in both))


def _finetune_folder(folder: Path, recipe: FinetuneRecipe) -> Path:
    return folder / "finetune" / recipe.name


def _other_recipe(folder: Path, verb: str, changes: str = "") -> CheckpointError:
    return CheckpointError(
        f"{folder}: this cell was {verb} with another recipe{changes}",
        "start the changed recipe as a new run, without `resume=RUN`",
    )
