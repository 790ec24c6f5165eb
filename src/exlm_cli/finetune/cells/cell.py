"""A cell of a fine-tuning run: what it trains, and what it has left in its folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
from exlm_cli.files import read_json
from exlm_cli.finetune.results import LOGITS_FILE, RESULT_FILE, CellResult, cell_folder
from exlm_cli.train.checkpoint import best_paths, checkpoint_paths


@dataclass(frozen=True)
class Cell:
    """One seed at one grid point on one split of the rows.

    Attributes:
        run: Run directory.
        point: Its recipe has this split.
        label: Name of the cell in messages and on a bar.
    """

    run: Path
    point: GridPoint
    seed: int
    label: str

    @property
    def recipe(self) -> FinetuneRecipe:
        """What it is trained with."""
        return self.point.recipe

    @property
    def split_seed(self) -> int:
        """Names the split in `scores.csv`."""
        return self.recipe.task.split_seed

    @property
    def folder(self) -> Path:
        """Where it is trained."""
        return cell_folder(self.run, self.point.label, self.split_seed, self.seed)

    @property
    def is_done(self) -> bool:
        """Whether the cell has its result."""
        return (self.folder / RESULT_FILE).is_file()

    @property
    def has_weights(self) -> bool:
        """Whether the weights of its best epoch exist; `drop_weights` deletes them."""
        return bool(best_paths(self.folder))

    def read(self) -> CellResult:
        """Return its `result.json`; a file that cannot be read is a `CheckpointError`."""
        hint = "delete the file; a resumed run trains this cell again"
        return read_json(self.folder / RESULT_FILE, CellResult, hint=hint)

    def drop_weights(self) -> None:
        """Delete its weights and logits; its result and curves stay."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        (self.folder / LOGITS_FILE).unlink(missing_ok=True)

    def drop_checkpoints(self) -> None:
        """Delete what a finished cell needs no more; a process killed at this point may have left some.

        The parent of a worker may be deleting all weights of a cell that is beaten.
        """
        for path in checkpoint_paths(self.folder):
            shutil.rmtree(path, ignore_errors=True)
