"""`exlm eval`: score checkpoints, lay runs side by side, apply a model to new rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.options import Device, DeviceOption, JsonOption
from exlm_cli.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from exlm_cli.analysis.embeddings import Embeddings
    from exlm_cli.analysis.predict import Predictions
    from exlm_cli.progress import Progress

# repeated from `report.tables`, whose import is too slow for `--help`; a test compares them
_FORMATS = ("markdown", "csv", "latex")


def evaluate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN...", help="Runs of `exlm pretrain` and `exlm finetune`; default: the newest."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="FILE", help="Validation files, or new rows to predict or embed; repeatable."),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option("--predictions", metavar="CSV", help="Write what the model says of each row of --data."),
    ] = None,
    embeddings: Annotated[
        Path | None, typer.Option("--embeddings", metavar="FILE", help="Write vectors of --data as .npz or .parquet.")
    ] = None,
    smiles_column: Annotated[
        str | None, typer.Option("--smiles-column", metavar="NAME", help="Column of --data with the SMILES.")
    ] = None,
    text_column: Annotated[
        str | None, typer.Option("--text-column", metavar="NAME", help="Column of --data with the text.")
    ] = None,
    formats: Annotated[
        str | None, typer.Option("--format", metavar="LIST", help=f"Write the tables too, as {','.join(_FORMATS)}.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where tables and figures go; default: report/ of the run."),
    ] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw curves and confusion matrices.")] = True,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score runs side by side, beside the paper's numbers; or apply one to rows of your own.

    Pre-trained ones: loss, perplexity, mask accuracy, entropy, health of the DAG. Fine-tuned ones: their metrics over
    seeds, curves and confusion matrices. With --predictions the seeds' mean probability for each row of --data.
    """
    from exlm_cli.cli import console

    wanted = _parse_formats(formats)
    column = _only_one(smiles_column, text_column)
    progress = console.open_progress()
    paths = runs or [_newest_run(progress)]
    from exlm_cli.analysis.scores import run_kind

    kinds = {path: run_kind(path) for path in paths}
    chosen_device = (device or Device.auto).value
    applies = embeddings is not None or predictions is not None
    if applies or (data and "finetune" in kinds.values()):
        table = _only_table(data, paths, embeddings)
        if embeddings is not None:
            return _embed(paths[0], kinds[paths[0]], table, embeddings, column, chosen_device, progress, as_json)
        if kinds[paths[0]] == "pretrain":
            raise ConfigError(
                f"`--predictions` needs a fine-tuned model; {paths[0]} is a pre-trained one",
                "fine-tune it with `exlm finetune`, or write its vectors with `--embeddings`",
            )
        written = predictions or paths[0] / "report" / f"predictions-{table.name.split('.')[0]}.csv"
        return _predict(paths[0], table, written, column, chosen_device, progress, as_json)
    if column is not None:
        raise ConfigError("`--smiles-column` and `--text-column` choose a column of `--data` to predict or embed")
    _score(paths, kinds, data or [], wanted, out, figures, chosen_device, progress, as_json)


def _score(
    paths: list[Path],
    kinds: dict[Path, Any],
    data: list[str],
    formats: list[str],
    out: Path | None,
    has_figures: bool,
    device: str,
    progress: "Progress",
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from exlm_cli.analysis.scores import load_finetuned_runs, run_directory, tell_apart
    from exlm_cli.cli import console
    from exlm_cli.report.score_report import collect_tables, draw_figures
    from exlm_cli.report.tables import as_terminal, write_tables

    finetuned = load_finetuned_runs([path for path in paths if kinds[path] == "finetune"])
    own = [path for path in paths if kinds[path] == "pretrain"]
    pretrained = []
    if own:
        from exlm_cli.analysis.evaluate import evaluate_pretrained

        for path, name in zip(own, tell_apart([path.resolve() for path in own]), strict=True):
            pretrained.append(evaluate_pretrained(path, name, valid=data, device=device, progress=progress))
    tables = collect_tables(finetuned, pretrained)
    files, notes = draw_figures(finetuned, out) if has_figures else ([], [])
    if formats:
        files += write_tables(tables, out or run_directory(paths[0]) / "report", formats)
    if as_json:
        entries: list[dict[str, Any]] = [{"kind": "pretrain", **asdict(score)} for score in pretrained]
        entries += [{"run_dir": str(run.folder), "name": run.name, **run.results} for run in finetuned]
        # of one run, what scripts look for stands on top too
        top = entries[0] if len(entries) == 1 else {}
        return console.emit_json({**top, "runs": entries, "files": [str(file) for file in files]})
    for table in tables:
        console.emit_renderable(as_terminal(table))
        console.emit_text("")
    for note in notes:
        progress.message(f"note: {note}")
    if files:
        console.emit_text("\n".join(f"wrote {file}" for file in files))


def _predict(
    run: Path, table: Path, written: Path, column: str | None, device: str, progress: "Progress", as_json: bool
) -> None:
    from exlm_cli.analysis.predict import predict, write_prediction_csv
    from exlm_cli.tasks.finetuned import load_finetuned

    predictions = predict(load_finetuned(run, device=device), table, column=column, progress=progress)
    write_prediction_csv(predictions, written)
    _emit_applied(predictions, {"predictions": str(written), "metrics": predictions.metrics}, as_json=as_json)


def _embed(
    run: Path,
    kind: str,
    table: Path,
    written: Path,
    column: str | None,
    device: str,
    progress: "Progress",
    as_json: bool,
) -> None:
    from exlm_cli.analysis.embeddings import (
        check_suffix,
        embed,
        finetuned_encoder,
        pretrained_encoder,
        write_embeddings,
    )

    check_suffix(written)
    if kind == "pretrain":
        from exlm_cli.train.pretrained import load_pretrained

        encoder = pretrained_encoder(load_pretrained(run, device=device, progress=progress))
    else:
        from exlm_cli.tasks.finetuned import load_finetuned

        encoder = finetuned_encoder(load_finetuned(run, device=device))
    vectors = embed(encoder, table, column=column, progress=progress)
    write_embeddings(vectors, written)
    _emit_applied(vectors, {"embeddings": str(written), "width": vectors.cls.shape[1]}, as_json=as_json)


def _emit_applied(applied: "Predictions | Embeddings", made: dict[str, Any], *, as_json: bool) -> None:
    """Say what became of a table's rows."""
    import math

    from exlm_cli.cli import console

    rows = applied.rows
    num_rows, num_readable = len(rows.table), len(rows.readable)
    metrics = {k: None if math.isnan(v) else v for k, v in made.pop("metrics", {}).items()}
    if as_json:
        counts = {"rows": num_rows, "unreadable_rows": num_rows - num_readable}
        return console.emit_json({**made, **counts, "metrics": metrics, "notes": list(applied.notes)})
    console.emit_pairs({**made, "rows": num_rows, "unreadable_rows": num_rows - num_readable, **_shown(metrics)})
    for note in applied.notes:
        console.emit_text(f"note: {note}")


def _shown(metrics: dict[str, float | None]) -> dict[str, object]:
    return {name: "not defined" if value is None else value for name, value in metrics.items()}


def _only_table(data: list[str] | None, paths: list[Path], embeddings: Path | None) -> Path:
    """Return the table that one run is applied to."""
    option = "--embeddings" if embeddings is not None else "--predictions"
    if not data or len(data) > 1:
        given = "none is given" if not data else f"{len(data)} are given"
        raise ConfigError(
            f"`{option}` needs one `--data` file; {given}", f"`exlm eval RUN --data new.csv {option} FILE`"
        )
    if len(paths) > 1:
        raise ConfigError(
            f"`--data` applies one run to new rows; {len(paths)} are given", "give one fine-tuned run at a time"
        )
    return Path(data[0]).expanduser()


def _only_one(smiles_column: str | None, text_column: str | None) -> str | None:
    if smiles_column is not None and text_column is not None:
        raise ConfigError("give `--smiles-column` or `--text-column`, not both")
    return smiles_column if smiles_column is not None else text_column


def _parse_formats(given: str | None) -> list[str]:
    names = [] if given is None else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in _FORMATS:
            raise ConfigError(f"`--format {given}`: {name!r} is none of {', '.join(_FORMATS)}")
    return names


def _newest_run(progress: "Progress") -> Path:
    from exlm_cli.errors import ExlmError
    from exlm_cli.run_dir import RUNS_ROOT, find_newest_run, read_run_json
    from exlm_cli.tasks.results import RESULTS_FILE

    def is_scorable(run: Path) -> bool:
        try:
            command = read_run_json(run).get("command")
        except ExlmError:
            return False
        is_finished = command == "finetune" and (run / RESULTS_FILE).is_file()
        return is_finished or (command == "pretrain" and any((run / "checkpoints").glob("step-*")))

    newest = find_newest_run(RUNS_ROOT, is_scorable)
    if newest is None:
        raise CheckpointError(
            f"no run was given, and there is none with a checkpoint under {RUNS_ROOT}/",
            "make one with `exlm pretrain --recipe quickstart-text`",
        )
    progress.message(f"run: {newest}, the newest one")
    return newest
