"""`exlm predict` and `exlm embed`: predictions of a fine-tuned run, or vectors of any run, for the rows of a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.options import Device, JsonOption, ScoringDeviceOption, SmilesColumnOption, TextColumnOption
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.tasks import InputKind
    from exlm_cli.tasks.base import PredictionSummary


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `exlm finetune`.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="New rows, in the layout of the run's task.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Predictions; default: report/predictions-<FILE> of the run."),
    ] = None,
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    device: ScoringDeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Predict new rows with a fine-tuned run.

    The predictions are the means over the run's seeds. Where the file has labels they are scored too. They are
    written as CSV; those of GLUE and SQuAD in the official layouts, as .tsv and .json.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import given_runs
    from exlm_cli.paths import expand_path

    (given,) = given_runs([run])
    path = expand_path(file)
    if given.kind == "pretrain":
        raise ConfigError(
            f"{run} is a pre-trained run, which predicts no labels",
            f"fine-tune it with `exlm finetune`, or write its vectors with `exlm embed {run} {file}`",
        )
    from exlm_cli.finetune.model import load_finetuned
    from exlm_cli.finetune.predict import predict as predict_file

    finetuned = load_finetuned(run, device=device.value)
    column = input_column(run, finetuned.results.input_kind, smiles_column, text_column)
    progress = console.open_progress()
    summary = predict_file(finetuned, path, out, folder=given.report, column=column, progress=progress)
    print_summary(summary, as_json=as_json)


def embed(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `exlm pretrain` or `exlm finetune`.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="CSV or TSV with a header, or one row a line.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Vectors, as .npz or .parquet.")],
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    device: ScoringDeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Write vectors of SMILES or texts from a run's encoder.

    Each row has two vectors: the last state at [CLS], and the mean of the last states of the tokens. Of a fine-tuned
    run the seed with the best validation score is taken.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import given_runs
    from exlm_cli.paths import expand_path

    (given,) = given_runs([run])
    path = expand_path(file)
    progress = console.open_progress()
    from exlm_cli.finetune import embed as engine

    if given.kind == "pretrain":
        from exlm_cli.train.pretrained import load_pretrained

        encoder = engine.pretrained_encoder(load_pretrained(run, device=device.value, progress=progress))
    else:
        from exlm_cli.finetune.model import load_finetuned

        encoder = engine.finetuned_encoder(load_finetuned(run, device=device.value))
    column = input_column(run, encoder.kind, smiles_column, text_column)
    print_summary(engine.embed(encoder, path, out, column=column, progress=progress), as_json=as_json)


def input_column(run: Path, kind: "InputKind", smiles_column: str | None, text_column: str | None) -> str | None:
    """Return the name of the column that a model reads; None where the user names none.

    Raises:
        ConfigError: Both are given, or one that the model does not read.
    """
    if smiles_column is not None and text_column is not None:
        raise ConfigError("give `--smiles-column` or `--text-column`, not both")
    read, other = (smiles_column, text_column) if kind == "smiles" else (text_column, smiles_column)
    if other is not None:
        words = {"text": ("text", "smiles", "SMILES"), "smiles": ("SMILES", "text", "text")}
        own, option, wanted = words[kind]
        raise ConfigError(
            f"`--{option}-column {other}`: {run} is a model of {own}",
            f"give a run of a model of {wanted}, or name the column with `--{kind}-column`",
        )
    return read


def print_summary(summary: "PredictionSummary", *, as_json: bool) -> None:
    """Print how many rows were read, their scores, and the files."""
    from exlm_cli.cli import console
    from exlm_cli.cli.hints import to_options

    counts = {"rows": summary.num_rows, "unreadable_rows": summary.num_unreadable}
    if as_json:
        return console.emit_json({"files": summary.files, **counts, "metrics": summary.metrics, "notes": summary.notes})
    console.emit_pairs({**counts, **summary.metrics})
    for note in summary.notes:
        console.emit_text(f"note: {to_options(note)}")
    console.emit_files(summary.files)
