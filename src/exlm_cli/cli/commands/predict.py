"""`exlm predict` and `exlm embed`: predictions of a fine-tuned run, or vectors of any run, for the rows of a file."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exlm_cli.cli.options import (
    JsonOption,
    RunArgument,
    ScoringDeviceOption,
    SmilesColumnOption,
    TextColumnOption,
    choose_columns,
)
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.finetune.cells.model import Finetuned
    from exlm_cli.finetune.evaluation.calibration import PredictedRows
    from exlm_cli.finetune.scores import Predictor
    from exlm_cli.progress import Progress
    from exlm_cli.tasks.base import EncodedSplit, NewRows

MAX_EXPLAINED = 20
"""Molecules of a page of explanations; each is predicted once for every atom."""


NewRowsArgument = Annotated[
    Path, typer.Argument(metavar="FILE", parser=expand_path, help="New rows, in the layout of the run's task.")
]
PredictionsOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        parser=expand_path,
        help="Predictions; default: report/predictions-<FILE> of the run.",
    ),
]
PredictorOption = Annotated[
    Literal["model", "baseline", "both"] | None,
    typer.Option(
        "--with",
        metavar="WHAT",
        help="model, its best baseline, or both; default: the best on the run's validation rows.",
    ),
]
LevelOption = Annotated[
    float,
    typer.Option("--interval-level", metavar="SHARE", help="Share of the true values that intervals should hold."),
]
FiguresOption = Annotated[
    bool, typer.Option("--figures/--no-figures", help="Draw calibration or intervals if FILE has labels.")
]
ExplainOption = Annotated[
    bool,
    typer.Option("--explain", help=f"Draw what each atom adds to the predictions of the first {MAX_EXPLAINED} rows."),
]


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `exlm finetune`.")],
    file: NewRowsArgument,
    out: PredictionsOption = None,
    predictor: PredictorOption = None,
    interval_level: LevelOption = 0.9,
    figures: FiguresOption = True,
    explain: ExplainOption = False,
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    device: ScoringDeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Predict new rows with a fine-tuned run.

    The output has the mean over the run's seeds and splits, its spread, and intervals of values or calibrated
    probabilities. Calibration needs ten validation rows of each answer; with fewer, probabilities are the model's own.
    It also marks rows of the run's training and validation splits. If the file has labels, predictions are scored too.
    They are written as CSV; those of GLUE and SQuAD also in the official layouts. docs/predictions.md explains each
    column.

    With `--explain`, a folder beside the predictions, whose name ends in `-atoms`, has `index.html` with the molecules
    of the first rows, an SVG of each, and `atoms.csv`. Orange atoms raise the prediction, blue ones lower it. For each
    atom, what predicts does so twice more: with this atom hidden, and with all others hidden.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import emit_predictions
    from exlm_cli.cli.runs import given_runs

    progress = console.open_progress()
    (given,) = given_runs([run], progress)
    from exlm_cli.finetune.cells.model import load_finetuned
    from exlm_cli.finetune.prediction.predict import predict as predict_file
    from exlm_cli.report.finetuning.figures import draw_calibration

    def draw(rows: "PredictedRows", predictions: Path) -> dict[Path, bytes]:
        return draw_calibration(rows, f"{given.name}: {file.name}", predictions.parent, predictions.stem)

    finetuned = load_finetuned(given.path, device=device)
    heading = f"{file.name} by {given.name}: what the atoms add"
    summary = predict_file(
        finetuned,
        file,
        out,
        folder=given.report,
        columns=choose_columns(finetuned.results.input_kind, smiles=smiles_column, text=text_column),
        predictor=predictor,
        interval_level=interval_level,
        draw=draw if figures else None,
        explain=partial(_explain, finetuned, heading, progress) if explain else None,
        progress=progress,
    )
    emit_predictions(summary, as_json=as_json)


def _explain(
    finetuned: "Finetuned",
    heading: str,
    progress: "Progress",
    encoded: "EncodedSplit",
    rows: "NewRows",
    predictor: "Predictor",
    folder: Path,
) -> dict[Path, bytes]:
    """Return the files of a folder that show what the atoms of the first rows add."""
    from exlm_cli.finetune.evaluation.verdict import describe_predictor
    from exlm_cli.finetune.prediction.explain import explain_molecules
    from exlm_cli.report.finetuning.explanations import ExplainedRow, explanation_files
    from exlm_cli.tasks.rows.task import ScoredRows

    assert isinstance(encoded, ScoredRows), "rows of molecules are"
    first = range(min(MAX_EXPLAINED, len(encoded)))
    found = explain_molecules(finetuned, encoded, [encoded.texts[row][0] for row in first], predictor, progress)
    explained = [
        ExplainedRow(int(rows.columns["line"][rows.readable[row]]), found[row], encoded.targets[row]) for row in first
    ]
    names, loss, known = finetuned.results.output_names, finetuned.results.loss, finetuned.results.predictors
    what = "the model" if known is None else describe_predictor(predictor, known)
    return explanation_files(
        explained, folder, names=names, loss=loss, heading=heading, num_rows=len(encoded), predictor=what
    )


def embed(
    run: RunArgument,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", parser=expand_path, help="CSV, TSV, Parquet, SDF, or one row per line."),
    ],
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
    from exlm_cli.cli.reports import emit_predictions
    from exlm_cli.cli.runs import given_runs

    progress = console.open_progress()
    (given,) = given_runs([run], progress)
    from exlm_cli.api.run import load
    from exlm_cli.finetune.prediction.embed import embed as embed_file

    encoder = load(given.path, device=device, progress=progress).encoder
    columns = choose_columns(encoder.kind, smiles=smiles_column, text=text_column)
    emit_predictions(embed_file(encoder, file, out, columns=columns, progress=progress), as_json=as_json)
