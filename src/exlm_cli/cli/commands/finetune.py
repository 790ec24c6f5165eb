"""`exlm finetune`: fine-tune a checkpoint with several seeds and splits, or search a grid, and score it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.options import (
    CheckpointOption,
    DeviceOption,
    DryRunOption,
    JsonOption,
    OutOption,
    RecipeOption,
    ResumeOption,
    SetOption,
    SmilesColumnOption,
    TextColumnOption,
    WorkersOption,
    collect_overrides,
    parse_seeds,
    refuse_together,
    refuse_with_resume,
    split_list,
)
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.finetune.results import FinetunedRun
    from exlm_cli.progress import Progress

_EXAMPLE = "for example `exlm finetune moleculenet bace` or `exlm finetune csv my_assay.csv --label-columns active`"
_ALL = "all"


def complete_suites(incomplete: str) -> list[str]:
    """Shell completion: return the suites of the package whose names begin with `incomplete`."""
    from exlm_cli.config.tasks import SUITES

    return [suite for suite in SUITES if suite.startswith(incomplete)]


def complete_tasks(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: return the tasks of the suite, also after some with commas."""
    from exlm_cli.config.tasks import SUITES

    section = SUITES.get(context.params.get("suite") or "")
    names = [] if section is None else [task.partition("/")[2] for task in section.tasks]
    before, comma, begun = incomplete.rpartition(",")
    names = [name for name in names if name] + [_ALL] * (len(names) > 1)
    return [f"{before}{comma}{name}" for name in names if name.startswith(begun)]


SuiteArgument = Annotated[
    str | None,
    typer.Argument(metavar="SUITE", help="moleculenet, glue, squad or csv.", autocompletion=complete_suites),
]
TaskArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A task (bace), several (rte,mrpc) or all; for csv, the file.",
        autocompletion=complete_tasks,
    ),
]
ScratchOption = Annotated[
    bool, typer.Option("--from-scratch", help="Use the checkpoint's architecture and tokenizer, not its weights.")
]
EncoderOption = Annotated[
    str | None,
    typer.Option("--encoder", metavar="RECIPE", help="Train this architecture from scratch; no checkpoint is needed."),
]
SeedsOption = Annotated[
    str | None,
    typer.Option(
        "--seeds", "--seed", metavar="LIST", help="Seeds, like 1,2,3: one to try, three for a result, five to compare."
    ),
]
ReplicatesOption = Annotated[
    int | None,
    typer.Option(
        "--num-replicates",
        metavar="N",
        help="Repeat on N splits, with `--split random`, `scaffold-balanced` or `group`.",
    ),
]
GridOption = Annotated[bool, typer.Option("--grid", help="Search the recipe's grid; the best point is reported.")]
DataDirOption = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help="Folder with the task's files; default: downloaded.")
]
SplitOption = Annotated[
    str | None,
    typer.Option("--split", metavar="NAME", help="scaffold[-balanced|-deepchem], random, group, time, file."),
]
GroupColumnOption = Annotated[
    str | None,
    typer.Option("--group-column", metavar="NAME", help="Column of a CSV whose groups `--split group` keeps whole."),
]
TimeColumnOption = Annotated[
    str | None,
    typer.Option("--time-column", metavar="NAME", help="Column of a CSV with dates, for `--split time`."),
]
SplitColumnOption = Annotated[
    str | None,
    typer.Option("--split-column", metavar="NAME", help="Column of a CSV that says train, valid or test."),
]
LabelColumnsOption = Annotated[
    str | None,
    typer.Option("--label-columns", metavar="LIST", help='Columns of a CSV with labels, like A,B or A,"B, in nM".'),
]
Log10Option = Annotated[
    bool | None, typer.Option("--log10", help="Train and score logarithms of the values; predict both.")
]
RowsOfMoleculeOption = Annotated[
    str | None,
    typer.Option("--replicates", metavar="mean|keep", help="Rows of one molecule: averaged, or kept (the default)."),
]
WeightColumnOption = Annotated[
    str | None, typer.Option("--weight-column", metavar="NAME", help="Column of a CSV: what rows weigh in training.")
]
BaselineOption = Annotated[
    bool | None,
    typer.Option(
        "--baseline/--no-baseline",
        help="Also score forests and boosting (molecules) or TF-IDF (texts); default: unless it takes long.",
    ),
]


def finetune(
    suite: SuiteArgument = None,
    name: TaskArgument = None,
    checkpoint: CheckpointOption = None,
    from_scratch: ScratchOption = False,
    encoder: EncoderOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    seeds: SeedsOption = None,
    num_replicates: ReplicatesOption = None,
    grid: GridOption = False,
    data_dir: DataDirOption = None,
    split: SplitOption = None,
    split_column: SplitColumnOption = None,
    group_column: GroupColumnOption = None,
    time_column: TimeColumnOption = None,
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    label_columns: LabelColumnsOption = None,
    log10: Log10Option = None,
    replicates: RowsOfMoleculeOption = None,
    weight_column: WeightColumnOption = None,
    baseline: BaselineOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    device: DeviceOption = None,
    workers: WorkersOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a checkpoint on a task and score it.

    One training per seed. The epoch with the best validation score is scored once on the test split. A run that was
    stopped continues with `--resume RUN`; finished seeds, splits and grid points are kept. NAME `all`, or several names
    with commas, runs these tasks of glue or moleculenet and prints Table 3 or 1 of the paper.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import emit_dry_run
    from exlm_cli.config.load import load_recipe
    from exlm_cli.export.given import local_run
    from exlm_cli.run_dir import SERIES_FILE

    task: dict[str, object] = {"data_dir": data_dir, "split": split, "split_column": split_column}
    task |= {"group_column": group_column, "time_column": time_column}
    task |= {"log10": log10, "replicates": replicates, "weight_column": weight_column}
    task |= {"smiles_column": smiles_column, "text_column": text_column}
    start = {"recipe": recipe, "out": out, "from_scratch": from_scratch, "encoder": encoder, "grid": grid}
    others = {"label_columns": label_columns, "baseline": baseline, "no_baseline": baseline is False}
    by_option = {f"--{key.replace('_', '-')}": value for key, value in {**start, **task, **others}.items()}
    refuse_with_resume(resume, {"": suite, **by_option})
    _refuse_unused_grid([] if grid or resume is not None else sets or [])
    options: dict[str, object] = {f"task.{key}": value for key, value in task.items()}
    if (pair := split_list(text_column)) is not None:
        options["task.text_column"] = pair if len(pair) > 1 else pair[0]
    options |= {"task.label_columns": split_list(label_columns), "seeds": parse_seeds(seeds), "device": device}
    options |= {"num_replicates": num_replicates, "init": "scratch" if from_scratch or encoder is not None else None}
    overrides = collect_overrides(sets, options)
    progress = console.open_progress()
    if resume is not None and (resume / SERIES_FILE).is_file():
        _refuse_overrides(resume, overrides)
        return _finish_series(resume, checkpoint, workers, progress, as_json=as_json)
    if names := _names_of_series(suite, name):
        alone = {"--dry-run": dry_run, "--encoder": encoder}
        refuse_together(f"{suite} {name}", alone, "give it with a single task")
        recipes = [_chosen(suite, one, recipe, overrides) for one in names]
        folder = _begin_series(recipes, checkpoint, out, progress, use_grid=grid, baseline=baseline)
        return _finish_series(folder, None, workers, progress, as_json=as_json)
    begun, chosen = _begun_and_chosen(resume, suite, name, recipe, overrides)
    if dry_run:
        return emit_dry_run(chosen, checkpoint=checkpoint, as_json=as_json)
    if resume is None and encoder is None:
        checkpoint = _find_checkpoint(checkpoint, chosen, progress, needs_weights=chosen.task.suite == "squad")
    if resume is None and recipe is None:
        _point_to_recipe(chosen, progress)
    from exlm_cli.finetune.run import run_finetuning

    run = run_finetuning(
        chosen,
        checkpoint=None if checkpoint is None else local_run(checkpoint, progress),
        encoder=None if encoder is None else load_recipe(encoder),
        out=out,
        resume=resume,
        begun=begun,
        use_grid=grid,
        baseline=baseline,
        workers=workers,
        progress=progress,
    )
    _report(run, as_json=as_json)


def _refuse_unused_grid(sets: Sequence[str]) -> None:
    for override in sets:
        if override.strip().startswith(("grid.", "grid=")):
            raise ConfigError(f"`--set {override}` takes effect only with `--grid`", "add `--grid`, or leave it out")


def _refuse_overrides(series: Path, overrides: Sequence[str]) -> None:
    if overrides:
        raise ConfigError(
            f"{series} holds several runs, which take no `--set`, `--seeds`, `--num-replicates` or `--device`",
            "resume it without them",
        )


def _report(run: "FinetunedRun", *, as_json: bool) -> None:
    """Write the page of a run, and print its scores and verdict."""
    from exlm_cli.cli import console
    from exlm_cli.report.finetuning.page import write_page
    from exlm_cli.report.finetuning.scores import results_tables

    page = write_page(run)
    if as_json:
        return console.emit_json({"run_dir": run.run_dir, "report": page, **run.as_json()})
    console.emit_tables(results_tables(run))
    _emit_verdict(run, "verdict")
    console.emit_line(f"results: {run.run_dir}/results.json")
    console.emit_line(f"scores: {run.run_dir}/scores.csv")
    console.emit_line(f"report: {page}")


def _emit_verdict(run: "FinetunedRun", label: str) -> None:
    from exlm_cli.cli import console

    first, *others = run.verdict
    console.emit_sentence(f"{label}: {first}")
    for sentence in others:
        console.emit_sentence(sentence)
    console.emit_text("")


def _names_of_series(suite: str | None, name: str | None) -> list[str]:
    """Return the tasks of `glue all`, or of `moleculenet bace,bbbp`; none for a single task."""
    if suite not in ("glue", "moleculenet") or name is None or not (name == _ALL or "," in name):
        return []
    return list(dict.fromkeys(_names(suite) if name == _ALL else split_list(name) or []))


def _begin_series(
    recipes: Sequence["FinetuneRecipe"],
    checkpoint: Path | None,
    out: Path | None,
    progress: "Progress",
    *,
    use_grid: bool,
    baseline: bool | None,
) -> Path:
    """Make the folder for runs on several tasks of a suite."""
    from exlm_cli.experiments.series import begin_series

    start = _find_checkpoint(checkpoint, recipes[0], progress, needs_weights=True)
    suite = recipes[0].task.suite
    return begin_series(recipes, suite=suite, checkpoint=start, out=out, use_grid=use_grid, baseline=baseline)


def _finish_series(
    folder: Path, checkpoint: Path | None, workers: int | None, progress: "Progress", *, as_json: bool
) -> None:
    """Finish the runs of a series, print and save the paper's table with their row, and write the page of each run."""
    from exlm_cli.cli import console
    from exlm_cli.experiments.series import run_series
    from exlm_cli.export.given import local_run
    from exlm_cli.report.experiments.paper import paper_tables
    from exlm_cli.report.finetuning.page import write_page
    from exlm_cli.report.tables import write_tables

    moved = None if checkpoint is None else local_run(checkpoint, progress)
    runs, diverged = run_series(folder, checkpoint=moved, workers=workers, progress=progress)
    tables = paper_tables(runs)
    files = write_tables(tables, folder / "report", ("markdown", "csv"))
    pages = [write_page(run) for run in runs]
    if as_json:
        entries = [
            {"run_dir": run.run_dir, "report": page, **run.as_json()} for run, page in zip(runs, pages, strict=True)
        ]
        console.emit_json({"run_dir": folder, "runs": entries, "files": files})
    else:
        console.emit_tables(tables)
        for run, page in zip(runs, pages, strict=True):
            _emit_verdict(run, f"verdict of {run.name}")
            console.emit_line(f"report: {page}")
        console.emit_files(files)
    if diverged:
        raise diverged[0]


def _names(suite: str) -> list[str]:
    """Return the tasks of a suite without its name."""
    from exlm_cli.config.tasks import SUITES

    return [task.partition("/")[2] for task in SUITES[suite].tasks]


def _point_to_recipe(recipe: "FinetuneRecipe", progress: "Progress") -> None:
    """Suggest the small recipe where the paper's would run on a CPU."""
    suite = recipe.task.suite
    if suite in ("glue", "moleculenet"):
        import torch

        if recipe.device == "cpu" or not torch.cuda.is_available():
            progress.message(f"{recipe.name} has the paper's budget; on a CPU `--recipe {suite}-small` takes minutes")


def _begun_and_chosen(
    resume: Path | None, suite: str | None, name: str | None, recipe: str | None, overrides: list[str]
) -> "tuple[FinetuneRecipe | None, FinetuneRecipe]":
    """Return the recipe of the run that is continued, as it is and with overrides; of a task None and its recipe."""
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.load import resumed_recipes

    if resume is None:
        return None, _chosen(suite, name, recipe, overrides)
    return resumed_recipes(resume, FinetuneRecipe, overrides)


def _chosen(suite: str | None, name: str | None, recipe: str | None, overrides: list[str]) -> "FinetuneRecipe":
    """Return the recipe of a task with the given options."""
    from exlm_cli.config.finetune import FinetuneRecipe, usual_csv_recipe
    from exlm_cli.config.load import load_recipe
    from exlm_cli.config.tasks import SUITES, check_task_name

    if suite is None:
        if recipe is None:
            raise ConfigError("give a task, a `--recipe` that names one, or `--resume` to continue a run", _EXAMPLE)
        return load_recipe(recipe, overrides, kind=FinetuneRecipe)
    if suite in SUITES and name is None:
        if suite == "csv":
            raise ConfigError("which CSV file?", _EXAMPLE)
        names = _names(suite)
        raise ConfigError(
            f"which task of {suite}? There are {', '.join(names)}", f"for example `exlm finetune {suite} {names[0]}`"
        )
    task = suite if name is None or suite == "csv" else f"{suite}/{name}"
    check_task_name(task)
    own = [f"task.files.train={json.dumps(name, ensure_ascii=False)}"] if suite == "csv" else []
    usual = usual_csv_recipe(overrides) if suite == "csv" else task.replace("/", "-")
    return load_recipe(recipe or usual, [*own, f"task.name={task}", *overrides], kind=FinetuneRecipe)


def _find_checkpoint(
    given: Path | None, recipe: "FinetuneRecipe", progress: "Progress", *, needs_weights: bool = False
) -> Path:
    """Return the checkpoint that was given, or the newest or a bundled one that reads the rows of the task."""
    from exlm_cli.cli.runs import choose_checkpoint

    kind = recipe.task.input_kind
    instead = "" if needs_weights else f"; `--from-scratch --encoder {kind}-small` needs none"
    return choose_checkpoint(
        given,
        {"SMILES run" if kind == "smiles" else "text run": lambda pretrained: pretrained.data.kind == kind},
        recipe_to_make_one=f"{kind}-small --set data.train=FILE",
        progress=progress,
        instead=instead,
        kind_of_rows=kind,
    )
