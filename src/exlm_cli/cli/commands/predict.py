"""`exlm predict` and `exlm embed`: predictions of a fine-tuned run, or vectors of any run, for the rows of a file."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.options import JsonOption, ScoringDeviceOption, SmilesColumnOption, TextColumnOption
from exlm_cli.errors import ConfigError
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.config.tasks import InputKind
    from exlm_cli.tasks.base import PredictionSummary


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `exlm finetune`.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="New rows, in the layout of the run's task.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            parser=expand_path,
            help="Predictions; default: report/predictions-<FILE> of the run.",
        ),
    ] = None,
    ensemble: Annotated[
        list[Path] | None,
        typer.Option(
            "--ensemble",
            metavar="RUN",
            parser=expand_path,
            help="Another run of the same task to average with; repeatable.",
        ),
    ] = None,
    interval_level: Annotated[
        float,
        typer.Option("--interval-level", metavar="SHARE", help="Share of the true values that intervals should hold."),
    ] = 0.9,
    escape_formulas: Annotated[
        bool,
        typer.Option("--escape-formulas", help="Put an apostrophe before cells that a spreadsheet takes for formulas."),
    ] = False,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw calibration or intervals if FILE has labels.")
    ] = True,
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    device: ScoringDeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Predict new rows with a fine-tuned run.

    The output has the mean over the run's seeds, its spread, and calibrated probabilities or intervals of values. It
    also marks rows of the run's training and validation splits. If the file has labels, predictions are scored too.
    They are written as CSV; those of GLUE and SQuAD also in the official layouts. docs/predictions.md explains
    each column.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import given_runs
    from exlm_cli.data.rows.decode import open_raw

    progress = console.open_progress()
    given, *others = given_runs([run, *(ensemble or [])], progress)
    path = expand_path(file)
    for one in (given, *others):
        if one.kind == "pretrain":
            raise ConfigError(
                f"{one.shown} is a pre-trained run, which predicts no labels",
                f"fine-tune it with `exlm finetune`, or write its vectors with `exlm embed {one.shown} {file}`",
            )
    open_raw(path).close()  # before torch is loaded
    from exlm_cli.finetune.model import load_finetuned
    from exlm_cli.finetune.predict import predict as predict_file

    finetuned, *members = (load_finetuned(one.path, device=device) for one in (given, *others))
    summary, labelled = predict_file(
        finetuned,
        path,
        out,
        folder=given.report,
        column=input_column(run, finetuned.results.input_kind, smiles_column, text_column),
        ensemble=members,
        interval_level=interval_level,
        escape_formulas=escape_formulas,
        progress=progress,
    )
    if figures and labelled is not None:
        from exlm_cli.report.score_figures import write_calibration_figure

        title = f"{' + '.join(one.name for one in (given, *others))}: {path.name}"
        written = summary.files[0]
        drawn = write_calibration_figure(labelled, title, written.parent, written.stem)
        summary = replace(summary, files=(*summary.files, *drawn))
    print_summary(summary, as_json=as_json)


def embed(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run of exlm pretrain or finetune, hub:OWNER/NAME or bundled:NAME."),
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", help="CSV or TSV with a header, or one row per line.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", parser=expand_path, help="Vectors, as .npz or .parquet.")
    ],
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    device: ScoringDeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write vectors of SMILES or texts from a run's encoder.

    Each row has two vectors: the last state at [CLS], and the mean of the last states of the tokens. A fine-tuned run
    uses the seed with the best validation score.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import given_runs
    from exlm_cli.data.rows.decode import open_raw

    path = expand_path(file)
    progress = console.open_progress()
    (given,) = given_runs([run], progress)
    open_raw(path).close()  # before torch is loaded
    from exlm_cli.api import load
    from exlm_cli.finetune.embed import embed as embed_file

    encoder = load(given.path, device=device, progress=progress).encoder
    column = input_column(run, encoder.kind, smiles_column, text_column)
    print_summary(embed_file(encoder, path, out, column=column, progress=progress), as_json=as_json)


def input_column(run: Path, kind: "InputKind", smiles_column: str | None, text_column: str | None) -> str | None:
    """Return the name of the column that a model reads; None where the user names none.

    Raises:
        ConfigError: Both are given, or one that the model does not read.
    """
    if smiles_column is not None and text_column is not None:
        raise ConfigError(
            "`--smiles-column` cannot be combined with `--text-column`",
            f"the model reads {kind}; leave the other one out",
        )
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
    from exlm_cli.cli.options import to_options
    from exlm_cli.report.scores import label_scores_table

    counts = {"rows": summary.num_rows, "unreadable_rows": summary.num_unreadable}
    known = {"rows_in_training_split": summary.num_in_training, "rows_in_validation_split": summary.num_in_validation}
    counts |= {name: count for name, count in known.items() if count}
    if as_json:
        scores: dict[str, Any] = {"metrics": summary.metrics, "metrics_without_known_rows": summary.metrics_of_new}
        scores |= {"labels": summary.labels} if summary.labels else {}
        return console.emit_json({"files": summary.files, **counts, **scores, "notes": summary.notes})
    without = {f"{name}_without_known_rows": value for name, value in summary.metrics_of_new.items()}
    console.emit_pairs({**counts, **summary.metrics, **without})
    if summary.labels:
        console.emit_tables([label_scores_table(summary.labels)])
    for note in summary.notes:
        console.emit_sentence(f"note: {to_options(note)}")
    console.emit_files(summary.files)
