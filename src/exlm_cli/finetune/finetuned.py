"""A fine-tuned model read back from its run, for scoring and for data that it has not seen."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe, resumed_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.results import best_cell_folder, how_to_redo, read_results
from exlm_cli.finetune.run_files import ENCODER_FILE
from exlm_cli.finetune.runner import TaskRunner
from exlm_cli.model.heads import TaskModel
from exlm_cli.train.checkpoint import best_paths, load_model_weights, verify_checkpoint
from exlm_cli.train.pretrain import autocast_dtype
from exlm_cli.train.pretrained import pick_device


@dataclass(frozen=True)
class Finetuned:
    """The models of a finished fine-tuning run, one for each seed, those of the best grid point.

    Attributes:
        run: Its directory.
        recipe: Of fine-tuning.
        encoder_recipe: Of pre-training.
        tokenizer: Of the checkpoint.
        sequence_length: Tokens of a sequence before repetition.
        results: `results.json`.
        runners: By seed.
    """

    run: Path
    recipe: FinetuneRecipe
    encoder_recipe: PretrainRecipe
    tokenizer: Tokenizer
    sequence_length: int
    results: dict[str, Any]
    runners: dict[int, TaskRunner]


def load_finetuned(run: Path, *, device: str | None = None) -> Finetuned:
    """Read the best epoch of every seed back.

    Args:
        run: Run directory of `exlm finetune`.
        device: Where the models go; none: the recipe's.

    Raises:
        CheckpointError: It is none, is not finished, or its weights are missing or damaged.
    """
    recipe = resumed_recipe(run, FinetuneRecipe)
    if device is not None:
        recipe = recipe.model_copy(update={"device": device})
    results = read_results(run)
    encoder_recipe = load_recipe(str(run / ENCODER_FILE))
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    torch_device = pick_device(recipe)
    runners = {}
    for seed in results["seeds"]:
        num_outputs = None if results["loss"] == "span" else len(results["output_names"])
        model = TaskModel(encoder_recipe, recipe.model, tokenizer.vocab_size, num_outputs)
        load_model_weights(_best_weights(best_cell_folder(run, results, seed)), model)
        runners[seed] = TaskRunner(
            model.to(torch_device).eval(),
            num_repeats=encoder_recipe.masking.num_repeats,
            pad_id=tokenizer.pad_id,
            microbatch_tokens=recipe.train.microbatch_tokens,
            device=torch_device,
            autocast_dtype=autocast_dtype(recipe.train, torch_device),
        )
    length = recipe.task.sequence_length or encoder_recipe.data.sequence_length
    return Finetuned(run, recipe, encoder_recipe, tokenizer, length, results, runners)


def _best_weights(cell: Path) -> Path:
    found = best_paths(cell)
    if not found:
        raise CheckpointError(f"{cell}: no weights in it", f"the weights were deleted: {how_to_redo(cell)}")
    reason = verify_checkpoint(found[0])
    if reason is not None:
        raise CheckpointError(f"{found[0]} is refused: {reason}", f"the weights were altered: {how_to_redo(cell)}")
    return found[0]
