"""`exlm eval`: scores of runs side by side."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.options import (
    JsonOption,
    OnInvalidOption,
    ScoringDeviceOption,
    SmilesColumnOption,
    TextColumnOption,
    choose_columns,
    collect_overrides,
    parse_formats,
    parse_numbers,
    refuse_without,
)
from exlm_cli.errors import ConfigError
from exlm_cli.paths import expand_path
from exlm_cli.report.tables import SUFFIXES

if TYPE_CHECKING:
    from exlm_cli.cli.reports import Output
    from exlm_cli.cli.runs import GivenRun
    from exlm_cli.config.pretrain import PretrainRecipe

_ENTROPY_MASK_RATIOS = (0.15, 0.387, 0.622, 0.789)
"""The mask ratios of section 3 without the smallest."""


RunsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN...", help="Runs of pretrain and finetune, or one sweep; default: the newest run."),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="FILE", help="Score pre-trained runs on these validation files; repeatable."),
]
EntropyOption = Annotated[
    bool, typer.Option("--entropy", help="Entropy of pre-trained models over mask ratios, as in Figure 12.")
]
MaskRatiosOption = Annotated[
    str | None, typer.Option("--mask-ratios", metavar="LIST", help="For --entropy; default: 0.15,0.387,0.622,0.789.")
]
NumStatesOption = Annotated[
    str | None,
    typer.Option(
        "--num-states",
        metavar="LIST",
        help="For --entropy: states per mask, like 2,4, of an ExLM other than a chain; default: the model's own.",
    ),
]
MaxSequencesOption = Annotated[
    int | None,
    typer.Option("--max-sequences", metavar="N", min=1, help="Score pre-trained runs on N sequences, evenly spread."),
]
ValidateAtOption = Annotated[
    str | None,
    typer.Option(
        "--validate-at",
        metavar="LIST",
        help="Score pre-trained runs also at numbers of masks, like 1,5, and mask ratios, like 0.387; default: the "
        "run's `train.validate_at`.",
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="LIST", help=f"Write the tables as {','.join(SUFFIXES)}; default with --out: csv."
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="DIR", parser=expand_path, help="Tables and figures; default: report/ of the run."
    ),
]
FiguresOption = Annotated[bool, typer.Option("--figures/--no-figures", help="Draw curves and confusion matrices.")]


def evaluate(
    runs: RunsArgument = None,
    valid: DataOption = None,
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    on_invalid: OnInvalidOption = None,
    entropy: EntropyOption = False,
    mask_ratios: MaskRatiosOption = None,
    num_states: NumStatesOption = None,
    max_sequences: MaxSequencesOption = None,
    validate_at: ValidateAtOption = None,
    formats: FormatOption = None,
    out: ReportOption = None,
    figures: FiguresOption = True,
    device: ScoringDeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Score runs side by side, with the paper's numbers.

    Pre-trained runs: loss, perplexity, mask accuracy, entropy, health of the DAG. Fine-tuned runs: metrics over
    seeds, ROC and precision-recall curves, confusion matrices. A sweep: the report of its finished cells.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import Output, emit_sweep
    from exlm_cli.cli.runs import given_runs, newest_run, runs_of_series
    from exlm_cli.experiments.results import is_sweep_run, load_sweep_run
    from exlm_cli.export.given import is_on_hub, local_run

    wanted_formats = parse_formats(formats if out is None else formats or "csv", list(SUFFIXES))
    output = Output(wanted_formats, out, has_figures=figures, as_json=as_json)
    ratios = parse_numbers("--mask-ratios", mask_ratios, float, "a number above 0 and below 1", 1e-6, 1 - 1e-6)
    states = parse_numbers("--num-states", num_states, int, "a whole number from 1 to 64", 1, 64)
    at = parse_numbers("--validate-at", validate_at, float, "a number of masks or a ratio", 1e-6, 65536)
    if entropy and at is not None:
        raise ConfigError("`--entropy` and `--validate-at` are two reports", "give one of them at a time")
    refuse_without("`--entropy`", entropy, {"--mask-ratios": ratios, "--num-states": states})
    of_data = {"--smiles-column": smiles_column, "--text-column": text_column, "--on-invalid": on_invalid}
    refuse_without("`--data FILE`", valid, of_data)
    # what only a pre-trained model can be asked
    asked = {"--entropy": entropy, "--data": valid, "--max-sequences": max_sequences, "--validate-at": at}
    option = next((name for name, value in asked.items() if value), None)
    progress = console.open_progress()
    wanted = runs or [newest_run(takes_all=option is None, progress=progress)]
    found = [(run, path) for run in wanted for path in runs_of_series(local_run(run, progress))]
    given = [path for _, path in found]
    if option is None and any(map(is_sweep_run, given)):
        if len(given) > 1:
            raise ConfigError("give one sweep at a time", "the runs under its `cells/` can be scored with others")
        return emit_sweep(load_sweep_run(given[0]), output, progress)
    chosen = given_runs(given, progress)
    scoring: dict[str, Any] = {
        "valid": valid or [],
        "max_sequences": max_sequences,
        "device": device,
        "progress": progress,
    }
    if option is not None:
        recipes = [_pretrained_recipe(run, option) for run in chosen]
        for each in recipes:  # refuse the option of the other kind
            choose_columns(each.data.kind, smiles=smiles_column, text=text_column)
        column = text_column if smiles_column is None else smiles_column
        scoring["overrides"] = collect_overrides(None, {"data.column": column, "data.on_invalid": on_invalid})
        if entropy:
            return _show_entropy(chosen, recipes, ratios or _ENTROPY_MASK_RATIOS, states or (), scoring, output)
    scoring["validate_at"] = at
    return _show_scores(chosen, [path for run, path in found if is_on_hub(run)], scoring, output)


def _pretrained_recipe(run: "GivenRun", option: str) -> "PretrainRecipe":
    """Return the recipe of a pre-trained run; refuse a fine-tuned one, for which there is no such option."""
    from exlm_cli.config.load import load_recipe
    from exlm_cli.run_dir import run_directory

    if run.kind == "finetune":
        raise ConfigError(
            f"`{option}` is for pre-trained models; {run.path} is fine-tuned",
            f"give the pre-trained run that it began with; `exlm predict {run.path} FILE` predicts new rows",
        )
    return load_recipe(run_directory(run.path) / "recipe.yaml")


def _show_scores(
    runs: "Sequence[GivenRun]", of_hub: Sequence[Path], scoring: Mapping[str, Any], output: "Output"
) -> None:
    """Score pre-trained runs, read the scores of fine-tuned ones, and print them side by side.

    Runs at the paths `of_hub` are copies from the Hub, which have no predictions to draw.
    """
    from exlm_cli.cli.reports import emit_report
    from exlm_cli.files import folder_for_results
    from exlm_cli.finetune.results import FinetunedRun, read_results
    from exlm_cli.report.experiments.paper import paper_tables
    from exlm_cli.report.finetuning.figures import draw_runs
    from exlm_cli.report.finetuning.scores import task_tables
    from exlm_cli.report.pretraining import pretraining_tables

    finetuned = [FinetunedRun(run.name, run.path, read_results(run.path)) for run in runs if run.kind == "finetune"]
    drawn = [run for run in finetuned if run.run_dir not in of_hub] if output.has_figures else []
    for without in finetuned if output.has_figures else []:
        if without not in drawn:
            scoring["progress"].message(
                f"{without.name}: no figures, because `exlm push` does not upload the predictions"
            )
    pretrained = []
    with folder_for_results(output.folder) if output.folder is not None else contextlib.nullcontext():
        for run in runs:
            if run.kind == "pretrain":
                from exlm_cli.experiments.evaluate import evaluate_pretrained

                pretrained.append(evaluate_pretrained(run.path, run.name, **scoring))
        files = draw_runs(drawn, output.folder)
    entries: list[dict[str, Any]] = [{"kind": "pretrain", **asdict(score)} for score in pretrained]
    entries += [{"run_dir": str(run.run_dir), "name": run.name, **run.as_json()} for run in finetuned]
    # scripts that score one run find its values at the top level
    top = entries[0] if len(entries) == 1 else {}
    tables = [*pretraining_tables(pretrained), *task_tables(finetuned), *paper_tables(finetuned)]
    emit_report(tables, files, {**top, "runs": entries}, output.folder or runs[0].report, output)


def _show_entropy(
    runs: "Sequence[GivenRun]",
    recipes: "Sequence[PretrainRecipe]",
    ratios: Sequence[float],
    states: Sequence[int],
    scoring: Mapping[str, Any],
    output: "Output",
) -> None:
    """Measure the entropy of pre-trained runs at each mask ratio and, for ExLM, number of states."""
    from exlm_cli.cli.reports import emit_report
    from exlm_cli.files import folder_for_results
    from exlm_cli.report.curves import DEFINITIONS, entropy_lines, entropy_table, write_entropy_figure

    # the copies of a token in Repeated MLM are not states
    have_states = [recipe.objective == "exlm" for recipe in recipes]
    if states and not any(have_states):
        raise ConfigError(
            f"`--num-states {','.join(map(str, states))}`: none of these runs has states per mask",
            "leave it out, or add a run of ExLM",
        )
    from exlm_cli.experiments.evaluate import measure_entropy

    folder = output.folder or runs[0].report
    with folder_for_results(folder) if output.has_figures or output.formats else contextlib.nullcontext():
        entropies = [
            (run.name, entropy)
            for run, has_states in zip(runs, have_states, strict=True)
            for entropy in measure_entropy(run.path, mask_ratios=ratios, ks=states if has_states else (), **scoring)
        ]
    files = []
    if output.has_figures:
        title = "Entropy of predictions over the mask ratio"
        files = write_entropy_figure(entropy_lines(entropies), folder, "entropy", title=title, captions=DEFINITIONS)
    content = {"entropies": [{"name": name, **entropy.as_json()} for name, entropy in entropies]}
    emit_report([entropy_table(entropies)], files, content, folder, output)
