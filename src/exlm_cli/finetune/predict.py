"""A fine-tuned run applied to a file it has not seen, in the layout of its task."""

from pathlib import Path

from exlm_cli.data.rows.records import COMPRESSIONS, FORMATS
from exlm_cli.errors import ConfigError
from exlm_cli.files import folder_for_results
from exlm_cli.finetune.model import Finetuned
from exlm_cli.progress import Progress
from exlm_cli.tasks.applied import Applied, no_answer_file, refuse_overwriting

_SUFFIXES = {"glue": ".tsv", "squad": ".json"}
"""What the official layouts of predictions end in; all else is a CSV."""


def predict(
    finetuned: Finetuned, path: Path, written: Path | None, *, folder: Path, column: str | None, progress: Progress
) -> Applied:
    """Predict the rows or questions of a file, write them, and score them where the file has labels.

    Args:
        finetuned: The run.
        path: The file, in the layout of the run's task.
        written: Where predictions go; none: `predictions-<name of the file>` in `folder`.
        folder: See there.
        column: Of the SMILES or text, where the task has one a row.
        progress: Who is told.

    Raises:
        ConfigError: An option that the task has no use for, a name of another format, or that of the file itself.
        DataError: The file cannot be read.
        CheckpointError: The file system refuses.
    """
    suite = finetuned.recipe.task.suite
    suffix = _SUFFIXES.get(suite, ".csv")
    if written is None:
        written = folder / f"predictions-{_name_of(path)}{suffix}"
    elif written.suffix.lower() != suffix:
        raise ConfigError(f"`out={written}`: predictions of {finetuned.results.task} go into a {suffix} file")
    if suite in _SUFFIXES and column is not None:
        raise ConfigError(f"{finetuned.results.task} finds its own columns: `--text-column` is for `exlm finetune csv`")
    files = (written, no_answer_file(written)) if suite == "squad" else (written,)
    refuse_overwriting(path, *files)
    with folder_for_results(written.parent, *files):
        match suite:
            case "glue":
                from exlm_cli.tasks.predict_glue import apply_to_glue_file

                return apply_to_glue_file(finetuned, path, written, progress=progress)
            case "squad":
                from exlm_cli.tasks.squad.predict import apply_to_squad_file

                return apply_to_squad_file(finetuned, path, written, progress=progress)
            case _:
                from exlm_cli.tasks.predict_table import apply_to_table

                return apply_to_table(finetuned, path, written, column=column, progress=progress)


def _name_of(path: Path) -> str:
    """Return `dev-v2.0` of `dev-v2.0.json.gz`."""
    while path.suffix.lower() in (*COMPRESSIONS, *FORMATS):
        path = path.with_suffix("")
    return path.name
