"""Validation of a pre-trained checkpoint, on the data of its run or on given files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.experiments.entropy import load_validation_data
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.train.checkpoint import load_state
from exlm_cli.train.pretrain import PretrainTask
from exlm_cli.train.pretrained import load_pretrained


@dataclass(frozen=True)
class PretrainedScore:
    """A pre-trained checkpoint and its validation figures.

    Attributes:
        name: Name in tables.
        checkpoint: Its path.
        objective: `exlm` or `mlm`.
        step: Training steps.
        parameters: Number of parameters.
        tokens: Input tokens of its training.
        data: Description of the validation data.
        metrics: Figures by name (`train.evaluation.summarise`).
    """

    name: str
    checkpoint: str
    objective: str
    step: int
    parameters: int
    tokens: int
    data: str
    metrics: Mapping[str, float]


def evaluate_pretrained(
    path: Path,
    name: str,
    *,
    valid: Sequence[str] = (),
    device: str = "auto",
    progress: Progress | None = None,
) -> PretrainedScore:
    """Score a checkpoint: loss, perplexity, mask accuracy, entropy and, with a DAG, its health.

    The masks are those of the run's own validation, so on its own data the figures are those of its metrics.jsonl, but
    over all validation sequences.

    Args:
        path: Run directory or `checkpoints/step-N`.
        name: Name in tables.
        valid: Files, folders or globs of text or SMILES; empty: the run's own validation data.
        device: Where the model runs.
        progress: Messages and bars.

    Raises:
        CheckpointError: There is no whole checkpoint.
        DataError: The validation data cannot be used.
    """
    progress = progress or SilentProgress()
    pretrained = load_pretrained(path, device=device, progress=progress)
    data = load_validation_data(pretrained, valid, progress)
    recipe = pretrained.recipe.model_copy(
        update={"train": pretrained.recipe.train.model_copy(update={"validation_sequences": None})}
    )
    progress.message(f"scoring {name} on {len(data.valid):,} sequences")
    model = pretrained.model
    metrics = PretrainTask(recipe, data, model, next(model.parameters()).device).validate()
    return PretrainedScore(
        name,
        str(pretrained.checkpoint),
        recipe.objective,
        pretrained.step,
        sum(p.numel() for p in model.parameters()),
        load_state(pretrained.checkpoint).loop.num_tokens,
        f"{len(data.valid):,} sequences of " + (", ".join(valid) if valid else "its own validation data"),
        metrics,
    )
