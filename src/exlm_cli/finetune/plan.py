"""What a fine-tuning run trains, splits of its rows and their cells, and the record that a resumption must meet."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.base import Mark, identity_values
from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
from exlm_cli.config.input_paths import write_run_recipe
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.data.rows.records import SKIPPED_COLUMNS, SKIPPED_FILE
from exlm_cli.data.tokenizer import TOKENIZER_FILE
from exlm_cli.errors import CheckpointError
from exlm_cli.files import make_folder, write_atomically, write_csv, write_json
from exlm_cli.finetune.cells.trainer import Cell, TaskData
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.finetune.prediction.training_rows import write_training_rows
from exlm_cli.finetune.results import ENCODER_FILE
from exlm_cli.run_dir import SPLIT_FILE, SPLITS_FOLDER, read_run_json, update_run_json
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.train.checkpoint import require_origin
from exlm_cli.train.pretrained import Pretrained, load_tokenizer, model_identity, recorded_name


@dataclass(frozen=True)
class SplitPlan:
    """One split of the rows.

    Attributes:
        seed: Its `task.split_seed`.
        data: Its encoded rows.
        cells: By grid point, then by seed.
    """

    seed: int
    task: DownstreamTask
    data: TaskData
    points: Sequence[GridPoint]
    cells: Mapping[str, Sequence[Cell]]

    @property
    def all_cells(self) -> list[Cell]:
        """Cells of every grid point."""
        return [cell for of_point in self.cells.values() for cell in of_point]


@dataclass(frozen=True)
class RunPlan:
    """What a run trains.

    Attributes:
        checkpoint: Source of the initial weights; None: they are drawn.
        has_baseline: Whether baselines are scored too.
        splits: The run's own first.
        features: Features of the molecules, which baselines and descriptors share.
    """

    folder: Path
    recipe: FinetuneRecipe
    weights: Pretrained
    checkpoint: Path | None
    use_grid: bool
    has_baseline: bool
    splits: Sequence[SplitPlan]
    features: FeatureStore

    @property
    def cells(self) -> list[Cell]:
        """Cells of every split."""
        return [cell for split in self.splits for cell in split.all_cells]


def record_beginning(plan: RunPlan, begun: FinetuneRecipe | None) -> None:
    """Write what a run begins with; of a run that is continued, its splits and recipe, which may be new.

    Args:
        begun: The recipe that the run has had until now; None: a new run.

    Raises:
        CheckpointError: Data, weights or recipe are not those that the run began with, or a file cannot be written.
    """
    if begun is None:
        _describe(plan)
    else:
        _refuse_changes(plan, begun)
    _write_splits(plan)
    write_training_rows(plan.folder, [split.task for split in plan.splits])
    write_run_recipe(plan.folder, plan.recipe)


def _describe(plan: RunPlan) -> None:
    """Write what a resumption and a later evaluation need of a new run, except its splits and recipe."""
    folder, weights, first = plan.folder, plan.weights, plan.splits[0]
    weights.tokenizer.save(folder / TOKENIZER_FILE)
    write_atomically(folder / ENCODER_FILE, dump_recipe(weights.recipe).encode())
    update_run_json(
        folder,
        {
            "command": "finetune",
            "task": first.task.name,
            "seeds": plan.recipe.seeds,
            "use_grid": plan.use_grid,
            "baseline": plan.has_baseline,
            "checkpoint": None if plan.checkpoint is None else recorded_name(weights),
            "checkpoint_sha256": weights.sha256,
            "data_fingerprint": first.data.fingerprint,
            "started_unix_s": round(time.time(), 3),
        },
    )
    if first.task.skipped:
        write_csv(folder / SKIPPED_FILE, SKIPPED_COLUMNS, (row.cells for row in first.task.skipped))


def _write_splits(plan: RunPlan) -> None:
    """Write the row numbers of every split; each file can be a `task.split_file`."""
    for number, split in enumerate(plan.splits):
        task = split.task
        content = {
            "task": task.name,
            "split": task.split_name,
            "sizes": task.split_sizes,
            "sha256": split_fingerprint(task.split_indices),
            "indices": {name: rows.tolist() for name, rows in task.split_indices.items()},
        }
        further = plan.folder / SPLITS_FOLDER
        if number:
            make_folder(further)
        write_json(further / f"split-{split.seed}.json" if number else plan.folder / SPLIT_FILE, content)


def _refuse_changes(plan: RunPlan, begun: FinetuneRecipe) -> None:
    """Refuse to continue with other data, weights or recipe; seeds and the number of splits may change."""
    folder, weights, first = plan.folder, plan.weights, plan.splits[0]
    described = read_run_json(folder)
    free = {name: getattr(plan.recipe, name) for name in ("seeds", "num_replicates")}
    then, now = (
        identity_values(recipe, without={Mark.INPUT}) for recipe in (begun.model_copy(update=free), plan.recipe)
    )
    changes = {
        f"data of {first.task.name}": described.data_fingerprint != first.data.fingerprint,
        "checkpoint": described.checkpoint_sha256 != weights.sha256,
        "recipe": then != now,
    }
    for name, is_changed in changes.items():
        if is_changed:
            detail = describe_changes(then, now) if name == "recipe" else ""
            raise CheckpointError(
                f"{folder}: the {name} is not the one this run began with{detail}",
                "an exact resume needs the same inputs and recipe; start a new run for changed ones",
            )
    encoder = load_recipe(folder / ENCODER_FILE)
    own = model_identity(encoder, load_tokenizer(folder, encoder))
    files = {"recipe": folder / ENCODER_FILE, "tokenizer": folder / TOKENIZER_FILE}
    require_origin(weights.checkpoint, model_identity(weights.recipe, weights.tokenizer), own, files)
