"""`exlm eval`: score checkpoints, lay runs side by side, apply a model to new rows."""

from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.grid_options import parse_numbers
from exlm_cli.cli.options import Device, JsonOption, ScoringDeviceOption
from exlm_cli.errors import ConfigError

# repeated from `report.tables`, whose import is too slow for `--help`; a test compares them
_FORMATS = ("markdown", "csv", "latex")


def evaluate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...", help="Runs of pretrain and finetune, or one sweep or grid; default: the newest."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="FILE", help="Validation files, or new rows to predict or embed; repeatable."),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option("--predictions", metavar="FILE", help="Write what the model says of each row of --data."),
    ] = None,
    embeddings: Annotated[
        Path | None, typer.Option("--embeddings", metavar="FILE", help="Write vectors of --data as .npz or .parquet.")
    ] = None,
    entropy: Annotated[
        bool, typer.Option("--entropy", help="Entropy of pre-trained models over mask ratios, as Figure 12.")
    ] = False,
    mask_ratios: Annotated[
        str | None,
        typer.Option("--mask-ratios", metavar="LIST", help="Of --entropy; default: 0.15,0.387,0.622,0.789."),
    ] = None,
    num_states: Annotated[
        str | None,
        typer.Option("--num-states", metavar="LIST", help="States a mask of --entropy, like 2,4; default: as trained."),
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
        typer.Option("--out", metavar="DIR", help="Where files go; default: report/ of the run."),
    ] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw curves and confusion matrices.")] = True,
    device: ScoringDeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Score runs side by side, beside the paper's numbers; or apply one to rows of your own.

    Pre-trained ones: loss, perplexity, mask accuracy, entropy, health of the DAG. Fine-tuned ones: their metrics over
    seeds, curves and confusion matrices. With --data, what a fine-tuned one says of rows in its task's own layout: the
    seeds' mean, and scores where the rows have labels. A sweep or a Repeated-MLM grid: its report, of what is done.
    """
    from exlm_cli.cli import console, eval_grids, eval_modes
    from exlm_cli.cli.checkpoints import newest_run

    output = eval_modes.Output(_parse_formats(formats), out, has_figures=figures, as_json=as_json)
    ratios = parse_numbers("--mask-ratios", mask_ratios, float, "a number above 0 and below 1", 1e-6, 1 - 1e-6)
    states = parse_numbers("--num-states", num_states, int, "a whole number from 1 to 64", 1, 64)
    _refuse_both({"--smiles-column": smiles_column, "--text-column": text_column})
    _refuse_both({"--predictions": predictions, "--embeddings": embeddings, "--entropy": entropy})
    column = None
    if smiles_column is not None:
        column = eval_modes.InputColumn("smiles", smiles_column)
    elif text_column is not None:
        column = eval_modes.InputColumn("text", text_column)
    if entropy and column is not None:
        raise ConfigError(
            f"`--{column.kind}-column {column.name}` does not go with `--entropy`",
            "it chooses a column of `--data` to predict or embed; validation files are read as the run's own",
        )
    if not entropy and (ratios or states):
        raise ConfigError("`--mask-ratios` and `--num-states` go with `--entropy`")
    progress = console.open_progress()
    takes_grid = not (entropy or data or predictions or embeddings or column)
    given = runs or [newest_run(takes_grid=takes_grid, progress=progress)]
    if takes_grid and eval_grids.holds_grid(given):
        return eval_grids.show_grid(given, output, progress)
    chosen = eval_modes.choose_runs(given)
    if entropy:
        eval_modes.show_entropy(chosen, data or [], ratios, states, output, device.value, progress)
    elif predictions is not None or embeddings is not None or (data and "finetune" in chosen.kinds):
        eval_modes.apply_run(chosen, data or [], predictions, embeddings, column, output, device.value, progress)
    elif column is not None:
        raise ConfigError("`--smiles-column` and `--text-column` choose a column of `--data` to predict or embed")
    else:
        eval_modes.show_scores(chosen, data or [], output, device.value, progress)


def _parse_formats(given: str | None) -> tuple[str, ...]:
    names = () if given is None else tuple(name.strip() for name in given.split(","))
    for name in names:
        if name not in _FORMATS:
            raise ConfigError(f"`--format {given}`: `{name}` is none of {', '.join(_FORMATS)}")
    return names


def _refuse_both(options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise ConfigError(f"give `{given[0]}` or `{given[1]}`, not both")
