"""Predictions of a fine-tuned run for a file that it has not seen, in the layout of its task."""

from dataclasses import replace
from pathlib import Path

from exlm_cli.config.tasks import RowTaskConfig
from exlm_cli.data.rows.records import COMPRESSIONS, FORMATS
from exlm_cli.errors import ConfigError
from exlm_cli.files import folder_for_results
from exlm_cli.finetune.model import Finetuned
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import PredictionSummary, TrainedTask
from exlm_cli.tasks.registry import new_rows_type


def predict(
    finetuned: Finetuned, path: Path, out: Path | None, *, folder: Path, column: str | None, progress: Progress
) -> PredictionSummary:
    """Predict the rows or questions of a file, write them, and score them where the file has labels.

    Args:
        finetuned: The run; every seed predicts.
        path: The file, in the layout of the run's task.
        out: File of predictions; None: `predictions-<name of the file>` in `folder`.
        folder: Folder of the predictions without `out`.
        column: Column of the SMILES or text, for a task that has one; None: the usual one.
        progress: Shows bars.

    Raises:
        ConfigError: A column that the task does not use, a name of another format, or the input file as output.
        DataError: The file cannot be read.
        CheckpointError: The file system refuses.
    """
    config = finetuned.recipe.task
    if column is not None and not isinstance(config, RowTaskConfig):
        raise ConfigError(f"{config.name} finds its own columns; `{column}` is given", "leave the column out")
    layout = new_rows_type(config)
    if out is None:
        out = folder / f"predictions-{_stem(path)}{layout.suffix}"
    elif out.suffix.lower() != layout.suffix:
        raise ConfigError(f"`out={out}`: predictions of {config.name} are a {layout.suffix} file", "give another name")
    files = layout.output_files(out)
    refuse_overwriting(path, *files)
    with folder_for_results(out.parent, *files):
        results = finetuned.results
        threshold = results.metrics["valid"].get("f1_threshold")
        median = None if threshold is None else threshold.median
        task = TrainedTask(config, results.input_kind, results.loss, results.output_names, median)
        rows = layout(task, path, column, progress)
        encoded = rows.encode(finetuned.tokenizer, finetuned.sequence_length)
        outputs = []
        with progress.bar("seeds", len(finetuned.runners)) as bar:
            for seed, runner in finetuned.runners.items():
                outputs.append(runner.predict(encoded, progress, f"seed {seed}") if len(encoded) else [])
                bar.update(len(outputs))
        summary = rows.write(outputs, out)
    return replace(summary, notes=(*encoded.notes, *summary.notes))


def refuse_overwriting(data: Path, *written: Path) -> None:
    """Refuse to overwrite the input file.

    Raises:
        ConfigError: One of `written` is `data`.
    """
    for path in written:
        if data.exists() and path.exists() and path.samefile(data):
            raise ConfigError(f"`out={written[0]}` would overwrite the input file {data}", "name another file")


def _stem(path: Path) -> str:
    """Return `dev-v2.0` of `dev-v2.0.json.gz`."""
    while path.suffix.lower() in (*COMPRESSIONS, *FORMATS):
        path = path.with_suffix("")
    return path.name
