"""Worker of fine-tuning: a process of `workers.pool` that trains cells of one run. Imports wait for a job."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.workers.pool import serve

if TYPE_CHECKING:
    from exlm_cli.finetune.cells.trainer import TaskData
    from exlm_cli.train.pretrained import Pretrained


def do_cell(folder: Path, values: Mapping[str, Any], progress: Progress) -> None:
    """Finish a cell; `finetune.run` gives the values."""
    import torch

    from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
    from exlm_cli.finetune.cells.trainer import run_cell
    from exlm_cli.finetune.plan import Cell
    from exlm_cli.train.pretrained import pick_device

    del folder  # a cell knows its own
    run, recipe = Path(values["run"]), FinetuneRecipe.model_validate(values["recipe"])
    if recipe.train.num_threads is not None:
        torch.set_num_threads(recipe.train.num_threads)
    weights = _initial_weights(run, values["checkpoint"])
    data = _rows(run, recipe.task.split_seed, values["checkpoint"], values["length"])
    point = GridPoint(values["point"]["label"], values["point"]["values"], recipe)
    cell = Cell(run, point, values["seed"], values["label"])
    run_cell(cell, data, weights, pick_device(recipe), progress=progress)


@functools.cache
def _initial_weights(run: Path, checkpoint: str | None) -> "Pretrained":
    from exlm_cli.config.load import load_recipe
    from exlm_cli.finetune.cells.model import untrained_model
    from exlm_cli.finetune.results import ENCODER_FILE
    from exlm_cli.train.pretrained import load_pretrained_weights, load_tokenizer

    if checkpoint is not None:
        return load_pretrained_weights(Path(checkpoint), SilentProgress())
    encoder = load_recipe(run / ENCODER_FILE)
    return untrained_model(encoder, load_tokenizer(run, encoder))


@functools.lru_cache(maxsize=2)
def _rows(run: Path, split_seed: int, checkpoint: str | None, length: int) -> "TaskData":
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.load import load_recipe
    from exlm_cli.finetune.cells.shared_rows import read_shared_rows

    config = load_recipe(run / "recipe.yaml", kind=FinetuneRecipe).task
    return read_shared_rows(run, split_seed, config, _initial_weights(run, checkpoint).tokenizer, length)


if __name__ == "__main__":
    serve({"cell": do_cell})
