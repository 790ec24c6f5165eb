"""One cell of a grid: pre-train, measure, fine-tune. Whatever an earlier process finished is kept.

`<cell>/pretrain/` is a run directory of its own, `measured.json` its figures, `finetune/<task>/` a run for each task,
and `result.json`, written last and whole, says that the cell is done and with which recipes.
"""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exlm_cli.config.cells import CellPlan
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import load_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.corpus.pipeline import prepare_data
from exlm_cli.errors import CheckpointError, DivergedError
from exlm_cli.experiments.cell_files import RESULT_FILE, read_cell_file
from exlm_cli.experiments.corruption import CorruptedShare, count_corrupted
from exlm_cli.experiments.entropy import measure_entropy
from exlm_cli.files import finite_or_none
from exlm_cli.finetune.result_shapes import WrittenGridCell, WrittenMeasures, WrittenOwnCell
from exlm_cli.progress import Progress
from exlm_cli.run_dir import read_run_json
from exlm_cli.train.checkpoint import write_json
from exlm_cli.train.identity import decisive_values, recipe_identity
from exlm_cli.train.pretrain import run_pretraining, special_tokens, validation_indices

_MEASURED_FILE = "measured.json"
_COUNTED_SEQUENCES = 2048
"""Training sequences in which corrupted tokens are counted, evenly spread, under the masks of the first epoch."""


def run_cell(plan: CellPlan, folder: Path, progress: Progress) -> dict[str, Any]:
    """Do what is left of a cell and return its `result.json`; scores of tasks that are not the plan's stay in it.

    Training that meets a loss which is no number ends the cell, not the grid: its result has `diverged`; in place of
    the scores of one task where that was fine-tuned. With the same recipe it is not tried again.

    Args:
        plan: The cell.
        folder: Where; made if need be. No other process may work in it.
        progress: Told of training, with a bar `pretrain` and one for each fine-tuning.

    Raises:
        CheckpointError: The folder was filled with another recipe.
        ExlmError: Whatever stops training, interruption included; running the cell again goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_changed_cell(plan, folder)
    shared = {
        "label": plan.label,
        "row": plan.row,
        "column": plan.column,
        "seed": plan.seed,
        **plan.about,
        "pretrain_identity": recipe_identity(plan.pretrain),
    }
    try:
        measured = _pretrain_and_measure(plan, folder, progress)
    except DivergedError as error:
        result = shared | {"corruption": _count(plan.pretrain, progress), "diverged": error.message}
    else:
        result = shared | measured | {"finetune": _scored_before(plan, folder) | _finetune(plan, folder, progress)}
    write_json(folder / RESULT_FILE, result)
    return result


def read_result(plan: CellPlan, folder: Path) -> dict[str, Any] | None:
    """Return the result of a finished cell; None where something of the plan is still to be done.

    Raises:
        CheckpointError: It belongs to another recipe, or is no result.
    """
    content = read_cell_file(folder / RESULT_FILE, WrittenOwnCell)
    if content is None:
        return None
    if content["pretrain_identity"] != recipe_identity(plan.pretrain):
        raise _other_recipe(folder, "trained")
    if "diverged" in content:
        return content
    done = {task: scored.get("identity") for task, scored in content["finetune"].items()}
    wanted = {recipe.task.name: finetune_identity(recipe) for recipe in plan.finetune}
    return content if wanted.items() <= done.items() and _is_measured(plan, content) else None


def refuse_changed_cell(plan: CellPlan, folder: Path) -> None:
    """Refuse to go on with what was begun in a folder with another recipe than the plan's.

    Raises:
        CheckpointError: It was; of fine-tuning that diverged another recipe is accepted.
    """
    begun = folder / "pretrain" / "recipe.yaml"
    if begun.is_file():
        then, now = (with_absolute_paths(recipe) for recipe in (load_recipe(str(begun)), plan.pretrain))
        if changes := describe_changes(decisive_values(then), decisive_values(now)):
            raise _other_recipe(folder, "trained", changes)
    scored = (read_cell_file(folder / RESULT_FILE, WrittenGridCell) or {}).get("finetune", {})
    for recipe in plan.finetune:
        # what diverged has no scores to lose
        has_diverged = "diverged" in scored.get(recipe.task.name, {})
        if not has_diverged and (changes := _changes_since_begun(recipe, folder)):
            raise _other_recipe(folder, "fine-tuned", changes)


def finetune_identity(recipe: FinetuneRecipe) -> str:
    """Return a hash of everything in a fine-tuning recipe that decides its scores."""
    content = _scoring_values(recipe) | {"optim": recipe.optim.as_identity()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _pretrain_and_measure(plan: CellPlan, folder: Path, progress: Progress) -> dict[str, Any]:
    measured = read_cell_file(folder / _MEASURED_FILE, WrittenMeasures)
    if measured is not None and _is_measured(plan, measured):
        return measured
    ratios = (plan.pretrain.masking.mask_ratio, *plan.entropy_ratios)
    run = folder / "pretrain"
    if run.exists() and not (run / "recipe.yaml").is_file():
        shutil.rmtree(run)  # killed before it began
    is_new = not run.exists()
    result = run_pretraining(
        plan.pretrain, out=run if is_new else None, resume=None if is_new else run, progress=progress
    )
    entropies = measure_entropy(
        run,
        mask_ratios=tuple(dict.fromkeys(ratios)),
        max_sequences=plan.measure_sequences,
        device=plan.pretrain.device,
        progress=progress,
    )
    measured = {
        "pretrain_identity": recipe_identity(plan.pretrain),
        "measure_sequences": plan.measure_sequences,
        "steps": result.steps,
        "elapsed_s": result.elapsed_s,
        "parameters": read_run_json(run)["parameters"],
        "corruption": _count(plan.pretrain, progress),
        # what is not defined is null: JSON has no NaN
        "metrics": finite_or_none(entropies[0].metrics),
        "entropy": [
            finite_or_none({name: value for name, value in asdict(entropy).items() if name != "metrics"})
            for entropy in entropies
        ],
    }
    write_json(folder / _MEASURED_FILE, measured)
    return measured


def _is_measured(plan: CellPlan, measured: dict[str, Any]) -> bool:
    """Say whether figures are of the plan's model, on as many sequences, at all of its mask ratios."""
    return (
        measured.get("pretrain_identity") == recipe_identity(plan.pretrain)
        and "measure_sequences" in measured
        and measured["measure_sequences"] == plan.measure_sequences
        and set(plan.entropy_ratios) <= {entry["mask_ratio"] for entry in measured.get("entropy", ())}
    )


def _count(recipe: PretrainRecipe, progress: Progress) -> dict[str, float] | None:
    """Count corrupted tokens; None where masks are not drawn token by token and App. C does not speak of them."""
    if recipe.masking.scheme != "bernoulli":
        return None
    data = prepare_data(recipe, rejected_csv=None, progress=progress)
    indices = validation_indices(data.train, _COUNTED_SEQUENCES)
    sequences = ((int(index), data.train[int(index)]) for index in indices)
    counted = count_corrupted(sequences, recipe.masking, special_tokens(data.tokenizer), seed=recipe.seed, epoch=0)
    return _as_json(counted)


def _as_json(counted: CorruptedShare) -> dict[str, float]:
    return asdict(counted) | {"measured": counted.measured, "standard_error": counted.standard_error}


def _scored_before(plan: CellPlan, folder: Path) -> dict[str, Any]:
    """Return the scores that a result has of the same model, those of tasks that the plan lacks among them."""
    before = read_cell_file(folder / RESULT_FILE, WrittenGridCell) or {}
    is_same = before.get("pretrain_identity") == recipe_identity(plan.pretrain)
    return dict(before.get("finetune", {})) if is_same else {}


def _finetune(plan: CellPlan, folder: Path, progress: Progress) -> dict[str, Any]:
    """Fine-tune on every task, and return the scores of each, the test split's where there is one, or `diverged`."""
    if not plan.finetune:
        return {}
    # what it imports takes seconds, in every process
    from exlm_cli.finetune.run import run_finetuning

    scored: dict[str, dict[str, Any]] = {}
    for recipe in plan.finetune:
        run = _finetune_folder(folder, recipe)
        if run.exists() and not ((run / "recipe.yaml").is_file() and not _changes_since_begun(recipe, folder)):
            shutil.rmtree(run)  # killed before it began, or diverged with another recipe
        is_new = not run.exists()
        try:
            results = run_finetuning(
                recipe,
                checkpoint=folder / "pretrain",
                out=run if is_new else None,
                resume=None if is_new else run,
                progress=progress,
            ).results
        except DivergedError as error:
            scored[recipe.task.name] = {"identity": finetune_identity(recipe), "diverged": error.message}
            continue
        metric = results["selection_metric"]
        split = "test" if "test" in results["metrics"] else "valid"
        scored[recipe.task.name] = {
            "identity": finetune_identity(recipe),
            "split": split,
            "split_sizes": results["split_sizes"],
            "max_rows": recipe.task.max_rows,
            "metric": metric,
            "aggregate": recipe.aggregate,
            "values": results["metrics"][split][metric]["values"],
            "metrics": results["metrics"][split],
        }
    return scored


def _changes_since_begun(recipe: FinetuneRecipe, folder: Path) -> str:
    """Return what of a recipe is not as fine-tuning in a cell began with it; empty where that has not begun."""
    begun = _finetune_folder(folder, recipe) / "recipe.yaml"
    if not begun.is_file():
        return ""
    both = (load_recipe(str(begun), kind=FinetuneRecipe), recipe)
    return describe_changes(*(_scoring_values(with_absolute_paths(one)) for one in both))


def _scoring_values(recipe: FinetuneRecipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude={"name", "purpose", "paper", "device"})


def _finetune_folder(folder: Path, recipe: FinetuneRecipe) -> Path:
    return folder / "finetune" / recipe.name


def _other_recipe(folder: Path, verb: str, changes: str = "") -> CheckpointError:
    return CheckpointError(
        f"{folder}: this cell was {verb} with another recipe{changes}", "choose another `--out` for a changed recipe"
    )
