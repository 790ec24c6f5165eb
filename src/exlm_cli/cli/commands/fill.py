"""`exlm fill`: the masks of one text or SMILES, or of every row of a file."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.options import (
    CheckpointOption,
    JsonOption,
    KindOption,
    ScoringDeviceOption,
    SmilesColumnOption,
    TextColumnOption,
    choose_columns,
)
from exlm_cli.errors import ConfigError
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.api import Run
    from exlm_cli.fill.engine import FillSettings
    from exlm_cli.progress import Progress
    from exlm_cli.train.pretrained import Pretrained

InputArgument = Annotated[
    str,
    typer.Argument(metavar="TEXT|FILE", help="Text or SMILES in which each [MASK] hides a token, or a file of such."),
]
FillingsOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        parser=expand_path,
        help="The CSV; default for a file: report/fillings-<FILE> of the run.",
    ),
]
TopOption = Annotated[
    int | None, typer.Option("--top", min=1, max=1000, metavar="N", help="Fillings of each row; default: 10.")
]
ScoreOption = Annotated[
    bool,
    typer.Option("--score", help="Score the column `filling` of each row, or texts without masks, instead of filling."),
]


def fill(
    given: InputArgument,
    checkpoint: CheckpointOption = None,
    out: FillingsOption = None,
    top: TopOption = None,
    score: ScoreOption = False,
    kind: KindOption = None,
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    device: ScoringDeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Fill the masks of a text, or of each row of a file, jointly.

    A file is a CSV, TSV or Parquet, also .gz, or has one text or SMILES a line. The result is a CSV with the file's own
    columns and a line for each filling, best first. `probability` is that of all masks together, among all fillings
    with one token for each mask; `probability_alone` is the product of those of its tokens, each mask on its own.
    `proven` says that no filling that is missing is more probable. A row that cannot be filled has a `problem`.

    With `--score`, each row has its log-probability in nats: of the words in its column `filling`, like `two|dogs`; or
    of a text without masks, each token masked in turn. docs/filling.md explains more.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.masked import choose_run, kind_of_file, require_kind, require_own_kind
    from exlm_cli.cli.reports import emit_predictions

    file = Path(given) if os.path.isfile(given) else None  # noqa: PTH113 - False also for a text that is too long
    input_kind = (
        require_kind(given, checkpoint, kind)
        if file is None
        else kind_of_file(file, checkpoint, kind, smiles_column=smiles_column, text_column=text_column)
    )
    if score:
        _refuse_for_scores({"--top": top, "--out": out if file is None else None})
    progress = console.open_progress()
    run = choose_run(checkpoint, input_kind, progress)
    from exlm_cli.api import load
    from exlm_cli.bundled_models import report_folder
    from exlm_cli.fill.engine import FillSettings
    from exlm_cli.fill.file import fill_file, score_file

    loaded = load(run, device=device, progress=progress)
    require_own_kind(kind, loaded.encoder.kind, checkpoint)
    settings = FillSettings(**{} if top is None else {"top": top})
    if file is None and score:
        return _score_text(loaded, given, as_json=as_json)
    if file is None:
        return _fill_text(loaded.pretrained, given, out, settings, progress, as_json=as_json)
    columns = choose_columns(loaded.encoder.kind, smiles=smiles_column, text=text_column)
    answer = score_file if score else partial(fill_file, settings=settings)
    summary = answer(loaded.pretrained, file, out, folder=report_folder(run), columns=columns, progress=progress)
    emit_predictions(summary, as_json=as_json)


def _refuse_for_scores(options: Mapping[str, object]) -> None:
    """Refuse options that scores do not use.

    Raises:
        ConfigError: One is given.
    """
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"`{option} {value}` cannot be combined with `--score`", "leave one of the two out")


def _score_text(run: "Run", text: str, *, as_json: bool) -> None:
    """Print the pseudo-log-likelihood of a text."""
    from exlm_cli.cli import console

    result = {"pseudo_log_likelihood": run.score(text)}
    console.emit_json(result) if as_json else console.emit_pairs(result)


def _fill_text(
    pretrained: "Pretrained", text: str, out: Path | None, settings: "FillSettings", progress: "Progress", as_json: bool
) -> None:
    """Print the fillings of one text, and write them where that is asked for."""
    from exlm_cli.cli import console
    from exlm_cli.fill.file import fill_one, fillings_table, line_values

    row, files = fill_one(pretrained, text, out, settings)
    for note in row.notes:
        progress.message(note)
    if as_json:
        fillings = [line_values(rank, line) for rank, line in enumerate(row.lines, start=1)]
        return console.emit_json({"checkpoint": pretrained.name, "fillings": fillings, "files": files})
    console.emit_renderable(fillings_table(row, text))
    console.emit_files(files)
