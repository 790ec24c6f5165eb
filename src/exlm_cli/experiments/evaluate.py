"""Figures of pre-trained checkpoints on their own validation data or on given files."""

from collections.abc import Sequence
from pathlib import Path

from exlm_cli.experiments.entropy import load_validation_data
from exlm_cli.experiments.scores import PretrainedScore
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.train.checkpoint import load_state
from exlm_cli.train.pretrain import PretrainTask
from exlm_cli.train.pretrained import load_pretrained


def evaluate_pretrained(
    path: Path,
    name: str,
    *,
    valid: Sequence[str] = (),
    device: str = "auto",
    progress: Progress | None = None,
) -> PretrainedScore:
    """Score a checkpoint: loss, perplexity, mask accuracy, entropy and, with a DAG, its health.

    The masks are those of every validation of the run, so the figures of its own data are those of its metrics.jsonl,
    but over all its validation sequences.

    Args:
        path: Run directory or `checkpoints/step-N`.
        name: What it is called in tables.
        valid: Files, folders or globs of text or SMILES; empty: the run's own validation data.
        device: Where.
        progress: Who is told.

    Raises:
        CheckpointError: No whole checkpoint there.
        DataError: Validation data that cannot be used.
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
