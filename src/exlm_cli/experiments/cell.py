"""One cell of a sweep: pre-train, measure, fine-tune. What an earlier process finished is kept.

`<cell>/pretrain/` and `finetune/<task>/` are ordinary runs. `scores.csv` and `result.json` are written together when
the pre-trained model is measured, and `result.json` again after each task.
"""

import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from exlm_cli.config.base import identity_of, identity_values
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import load_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import MaskingConfig, one_ratio
from exlm_cli.config.sweep import SweepCell
from exlm_cli.data import IntArray
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.data.masking import Masker, Sequences
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import CheckpointError, DivergedError
from exlm_cli.experiments.evaluate import measure_entropy
from exlm_cli.experiments.results import (
    RESULT_FILE,
    Corruption,
    MeasuredCell,
    SweepCellResult,
    TunedTask,
    masking_of,
    read_cell_result,
    task_folder,
)
from exlm_cli.files import json_bytes, write_json, write_together
from exlm_cli.finetune.results import RESULTS_FILE
from exlm_cli.finetune.scores import MODEL, SCORES_FILE, Origin, score_rows_of, score_table, scores_csv
from exlm_cli.progress import Progress
from exlm_cli.run_dir import read_run_json
from exlm_cli.train.pretrain import run_pretraining, validation_indices

_COUNTED_SEQUENCES = 2048
"""Training sequences in which corrupted tokens are counted, evenly spread, under the masks of the first epoch."""


def run_cell(cell: SweepCell, folder: Path, progress: Progress) -> MeasuredCell:
    """Finish a cell and return it; it keeps scores of tasks that its recipe no longer has.

    Training that diverges ends the cell, not the sweep: the result says so in `diverged`, or in that of a task where
    fine-tuning diverged. With the same recipe it is not tried again.

    Args:
        folder: Its folder, made where there is none. No other process may work in it.

    Raises:
        CheckpointError: The folder was filled with another recipe.
        ExlmError: Whatever stops training, interruption included; running the cell again continues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_changed(cell, folder)
    result = read_cell_result(folder)
    with progress.bar("trainings", 1 + len(cell.finetune)) as bar:
        if result is None or not _is_measured(cell, result):
            result = _pretrain_and_measure(cell, folder, result, progress)
        for number, recipe in enumerate(cell.finetune if result.diverged is None else (), start=1):
            bar.update(number)
            if not _is_tuned(recipe, result, folder):
                tuned = _finetune(recipe, folder, progress)
                result = result.model_copy(update={"finetune": {**result.finetune, recipe.task.name: tuned}})
                write_json(folder / RESULT_FILE, result)
    return MeasuredCell(folder, result)


def read_finished(cell: SweepCell, folder: Path) -> MeasuredCell | None:
    """Return a finished cell; None where something of it is still to be done.

    Raises:
        CheckpointError: It was begun with another recipe, or is damaged.
    """
    _refuse_changed(cell, folder)
    result = read_cell_result(folder)
    if result is None or not _is_measured(cell, result):
        return None
    is_tuned = all(_is_tuned(recipe, result, folder) for recipe in cell.finetune)
    return MeasuredCell(folder, result) if result.diverged is not None or is_tuned else None


def _pretrain_and_measure(
    cell: SweepCell, folder: Path, before: SweepCellResult | None, progress: Progress
) -> SweepCellResult:
    """Write and return the result of a cell, with the fine-tuning of an earlier result of the same pre-training."""
    identity = identity_of(cell.pretrain)
    described = {
        "label": cell.label,
        "seed": cell.seed,
        **dict(cell.description),
        "pretrain_identity": identity,
        "corruption": _count(cell.pretrain, progress),
    }
    run = folder / "pretrain"
    out, resume = _out_or_resume(run)
    try:
        trained = run_pretraining(cell.pretrain, out=out, resume=resume, progress=progress)
    except DivergedError as error:
        result = SweepCellResult(**described, diverged=error.message)
        write_json(folder / RESULT_FILE, result)
        return result
    ratios = tuple(dict.fromkeys((cell.pretrain.masking.mask_ratio, *cell.entropy_ratios)))
    entropies = measure_entropy(
        run, mask_ratios=ratios, max_sequences=cell.measure_sequences, device=cell.pretrain.device
    )
    result = SweepCellResult(
        **described,
        measure_sequences=cell.measure_sequences,
        mask_ratios=ratios,
        steps=trained.steps,
        elapsed_s=trained.elapsed_s,
        parameters=read_run_json(run).parameters,
        finetune=before.finetune if before is not None and before.pretrain_identity == identity else {},
    )
    rows = [
        row
        for entropy in entropies
        for row in score_rows_of(
            Origin(MODEL, masking_of(entropy.mask_ratio), 0, cell.seed), {"valid": entropy.metrics}, {}
        )
    ]
    write_together({folder / SCORES_FILE: scores_csv(score_table(rows)), folder / RESULT_FILE: json_bytes(result)})
    return result


def _is_measured(cell: SweepCell, result: SweepCellResult) -> bool:
    """Return whether a result is of this cell: its recipe, number of sequences and mask ratios; or diverged with it."""
    return result.pretrain_identity == identity_of(cell.pretrain) and (
        result.diverged is not None
        or (result.measure_sequences == cell.measure_sequences and {*cell.entropy_ratios} <= {*result.mask_ratios})
    )


def _is_tuned(recipe: FinetuneRecipe, result: SweepCellResult, folder: Path) -> bool:
    """Return whether a cell was fine-tuned with a recipe, or diverged with it."""
    tuned = result.finetune.get(recipe.task.name)
    if tuned is None or tuned.identity != identity_of(recipe):
        return False
    return tuned.diverged is not None or (task_folder(folder, recipe.task.name) / RESULTS_FILE).is_file()


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
    ratio, repeats = one_ratio(masking.mask_ratio), masking.num_repeats
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


def _finetune(recipe: FinetuneRecipe, folder: Path, progress: Progress) -> TunedTask:
    """Fine-tune a cell on a task, and return what became of it."""
    # importing it takes seconds, in every process
    from exlm_cli.finetune.run import run_finetuning

    run = task_folder(folder, recipe.task.name)
    if _changes_since_begun(run, recipe):
        shutil.rmtree(run)  # diverged with another recipe
    out, resume = _out_or_resume(run)
    try:
        run_finetuning(recipe, checkpoint=folder / "pretrain", out=out, resume=resume, progress=progress)
    except DivergedError as error:
        return TunedTask(identity=identity_of(recipe), diverged=error.message)
    return TunedTask(identity=identity_of(recipe))


def _out_or_resume(run: Path) -> tuple[Path | None, Path | None]:
    """Return `out` and `resume` of a training in a folder: a new run where there is none yet."""
    return (None, run) if (run / "recipe.yaml").is_file() else (run, None)


def _changes_since_begun(run: Path, recipe: PretrainRecipe | FinetuneRecipe) -> str:
    """Describe the changes of a recipe since a run began; empty if it has not begun."""
    if not (run / "recipe.yaml").is_file():
        return ""
    both = load_recipe(run / "recipe.yaml", kind=type(recipe)), recipe
    return describe_changes(*(identity_values(with_absolute_paths(one)) for one in both))


def _refuse_changed(cell: SweepCell, folder: Path) -> None:
    """Refuse to continue a cell that was begun with another recipe.

    Raises:
        CheckpointError: It was; fine-tuning that diverged may be begun again with another recipe.
    """
    if changes := _changes_since_begun(folder / "pretrain", cell.pretrain):
        raise _other_recipe(folder, "trained", changes)
    result = read_cell_result(folder)
    diverged = result.diverged_tasks if result is not None else []
    for recipe in cell.finetune:
        changes = _changes_since_begun(task_folder(folder, recipe.task.name), recipe)
        if changes and recipe.task.name not in diverged:
            raise _other_recipe(folder, "fine-tuned", changes)


def _other_recipe(folder: Path, verb: str, changes: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: this cell was {verb} with another recipe{changes}",
        "start the changed recipe as a new run, without `resume=RUN`",
    )
