"""`exlm finetune`: fine-tune a checkpoint with several seeds and splits, or search a grid, and score it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.options import (
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
    refuse_with_resume,
    split_words,
)
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.launch import is_quiet, num_ranks
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.pretrain import PretrainRecipe
    from exlm_cli.finetune.run import FinetuneResult
    from exlm_cli.progress import Progress
    from exlm_cli.report.scores import FinetunedRun
    from exlm_cli.tasks.base import DownstreamTask

_EXAMPLE = "for example `exlm finetune moleculenet bace` or `exlm finetune csv my_assay.csv --label-columns active`"
_ALL = "all"

SuiteArgument = Annotated[str | None, typer.Argument(metavar="SUITE", help="moleculenet, glue, squad or csv.")]
TaskArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="A task (bace), several (rte,mrpc) or all; for csv, the file."),
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="RUN",
        parser=expand_path,
        help="Pre-training run, hub:OWNER/NAME or bundled:NAME; default: the newest finished one, else a bundled one.",
    ),
]
ScratchOption = Annotated[
    bool, typer.Option("--from-scratch", help="Use the checkpoint's architecture and tokenizer, not its weights.")
]
EncoderOption = Annotated[
    str | None,
    typer.Option("--encoder", metavar="RECIPE", help="Train this architecture from scratch; no checkpoint is needed."),
]
SeedsOption = Annotated[str | None, typer.Option("--seeds", "--seed", metavar="LIST", help="Seeds, like 1,2,3.")]
ReplicatesOption = Annotated[
    int | None,
    typer.Option(
        "--num-replicates", metavar="N", help="Repeat on N splits, with `--split random` or `scaffold-balanced`."
    ),
]
GridOption = Annotated[bool, typer.Option("--grid", help="Search the recipe's grid; the best point is reported.")]
DataDirOption = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help="Folder with the task's files; default: downloaded.")
]
SplitOption = Annotated[
    str | None, typer.Option("--split", metavar="NAME", help="scaffold[-chiral|-balanced|-deepchem], random, file.")
]
LabelColumnsOption = Annotated[
    str | None,
    typer.Option("--label-columns", metavar="LIST", help='Columns of a CSV with labels, like A,B or A,"B, in nM".'),
]
BaselineOption = Annotated[
    bool | None,
    typer.Option(
        "--baseline/--no-baseline", help="Also score random forests; default: for molecules, unless it takes hours."
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
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    label_columns: LabelColumnsOption = None,
    baseline: BaselineOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    device: DeviceOption = None,
    workers: WorkersOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a checkpoint on a task and score it.

    One fine-tuning run per seed. The epoch with the best validation score is scored once on the test split. A run that
    was stopped continues with `--resume RUN`; finished seeds and grid points are kept. NAME `all`, or several names
    with commas, runs these tasks of glue or moleculenet and prints Table 3 or 1 of the paper.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import local_run
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.load import resumed_recipe
    from exlm_cli.run_dir import SERIES_FILE

    task = {
        "task.data_dir": data_dir,
        "task.split": split,
        "task.smiles_column": smiles_column,
        "task.text_column": text_column,
        "task.label_columns": split_words(label_columns),
    }
    start = {"suite": suite, "recipe": recipe, "out": out, "from_scratch": from_scratch or None, "encoder": encoder}
    refuse_with_resume(resume, {**start, **task, "use_grid": grid or None, "baseline": baseline})
    options = {"device": device, "seeds": parse_seeds(seeds), "num_replicates": num_replicates, **task}
    overrides = collect_overrides(sets, {**options, "init": "scratch" if from_scratch or encoder is not None else None})
    progress = console.open_progress()
    if resume is not None and (resume / SERIES_FILE).is_file():
        if overrides:
            raise ConfigError(
                f"{resume} holds several runs, which take no `--set`, `--seeds`, `--num-replicates` or `--device`",
                "resume it without them",
            )
        return _finish_series(resume, checkpoint, workers, progress, as_json=as_json)
    if suite in ("glue", "moleculenet") and name is not None and (name == _ALL or "," in name):
        if dry_run or encoder is not None:
            given = "--dry-run" if dry_run else f"--encoder {encoder}"
            raise ConfigError(f"`{given}` cannot be combined with `{suite} {name}`", "give it with a single task")
        names = _names(suite) if name == _ALL else split_words(name)
        recipes = [_chosen(suite, one, recipe, overrides) for one in dict.fromkeys(names or ())]
        _, start_run = _find_inputs(
            recipes[0], checkpoint, sets or [], use_grid=grid, needs_run=True, is_series=True, progress=progress
        )
        folder = _begin_series(recipes, suite, start_run, out, use_grid=grid, baseline=baseline)
        return _finish_series(folder, None, workers, progress, as_json=as_json)
    if workers is not None:
        raise ConfigError(f"`--workers {workers}` is for several tasks", "leave it out")
    if resume is None:
        resolved = _chosen(suite, name, recipe, overrides)
    else:
        resolved = resumed_recipe(resume, FinetuneRecipe, overrides)
    if dry_run:
        return console.emit_recipe(resolved, as_json=as_json)
    architecture = loaded = None
    if resume is None:
        architecture = _find_architecture(encoder, checkpoint, resolved)
        loaded, checkpoint = _find_inputs(
            resolved, checkpoint, sets or [], use_grid=grid, needs_run=architecture is None, progress=progress
        )
        if suite in ("glue", "moleculenet") and recipe is None:
            _point_to_small(suite, resolved, progress)
    elif checkpoint is not None:
        checkpoint = local_run(checkpoint, progress)
    from exlm_cli.finetune.run import run_finetuning

    result = run_finetuning(
        resolved,
        checkpoint=checkpoint,
        encoder=architecture,
        out=out,
        resume=resume,
        use_grid=grid,
        baseline=baseline,
        task=loaded,
        progress=progress,
    )
    _report(result, as_json=as_json)


def _report(result: "FinetuneResult", *, as_json: bool) -> None:
    """Write the page of a run, and print its scores and verdict; with several ranks, only rank 0 does."""
    from exlm_cli.cli import console
    from exlm_cli.report.page import write_page
    from exlm_cli.report.scores import FinetunedRun, results_tables

    if is_quiet():
        return
    run = FinetunedRun(result.run_dir.name, result.run_dir, result.results)
    page = write_page(run)
    if as_json:
        return console.emit_json({"run_dir": result.run_dir, "report": page, **run.as_json()})
    console.emit_tables(results_tables(run))
    _emit_verdict(run, "verdict")
    console.emit_line(f"results: {result.run_dir}/results.json")
    console.emit_line(f"scores: {result.run_dir}/scores.csv")
    console.emit_line(f"report: {page}")


def _emit_verdict(run: "FinetunedRun", label: str) -> None:
    from exlm_cli.cli import console

    for sentence in run.results.verdict:
        console.emit_sentence(f"{label}: {sentence}")
        console.emit_text("")


def _begin_series(
    recipes: Sequence["FinetuneRecipe"],
    suite: str,
    checkpoint: Path | None,
    out: Path | None,
    *,
    use_grid: bool,
    baseline: bool | None,
) -> Path:
    """Make the folder for runs on several tasks of a suite."""
    from exlm_cli.experiments.series import begin_series

    if num_ranks() > 1:
        raise ConfigError("several tasks cannot run on several ranks", "start the command once; it uses every GPU")
    assert checkpoint is not None, "a checkpoint was looked for"
    return begin_series(recipes, suite=suite, checkpoint=checkpoint, out=out, use_grid=use_grid, baseline=baseline)


def _finish_series(
    folder: Path, checkpoint: Path | None, workers: int | None, progress: "Progress", *, as_json: bool
) -> None:
    """Finish the runs of a series, print and save the paper's table with their row, and write the page of each run."""
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import local_run
    from exlm_cli.experiments.series import run_series
    from exlm_cli.report.page import write_page
    from exlm_cli.report.paper import paper_tables
    from exlm_cli.report.scores import FinetunedRun
    from exlm_cli.report.tables import write_tables

    moved = None if checkpoint is None else local_run(checkpoint, progress)
    finished, diverged = run_series(folder, checkpoint=moved, workers=workers, progress=progress)
    runs = [FinetunedRun(result.run_dir.name, result.run_dir, result.results) for result in finished]
    tables = paper_tables(runs)
    files = write_tables(tables, folder / "report", ("markdown", "csv"))
    pages = [write_page(run) for run in runs]
    if as_json:
        entries = [
            {"run_dir": run.folder, "report": page, **run.as_json()} for run, page in zip(runs, pages, strict=True)
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
    from exlm_cli.config.tasks import find_suite

    section = find_suite(suite)
    assert section is not None, "the caller has found it"
    return [task.partition("/")[2] for task in section.tasks]


def _point_to_small(suite: str, recipe: "FinetuneRecipe", progress: "Progress") -> None:
    """Suggest the small recipe where the paper's would run on a CPU."""
    import torch

    if recipe.device == "cpu" or not torch.cuda.is_available():
        progress.message(f"{recipe.name} has the paper's budget; on a CPU `--recipe {suite}-small` takes minutes")


def _find_architecture(
    encoder: str | None, checkpoint: Path | None, recipe: "FinetuneRecipe"
) -> "PretrainRecipe | None":
    """Return the recipe of `--encoder`, checked against the other options."""
    from exlm_cli.config.load import load_recipe

    if encoder is None:
        return None
    if checkpoint is not None:
        raise ConfigError(
            f"`--encoder {encoder}` cannot be combined with `--checkpoint {checkpoint}`",
            "a checkpoint has its own encoder",
        )
    found = load_recipe(encoder)
    if found.data.kind != recipe.task.input_kind:
        raise ConfigError(
            f"`--encoder {encoder}` reads {found.data.kind}; {recipe.task.name} has {recipe.task.input_kind}",
            f"for example `--encoder {'smiles' if recipe.task.input_kind == 'smiles' else 'text'}-small`",
        )
    return found


def _chosen(suite: str | None, name: str | None, recipe: str | None, overrides: list[str]) -> "FinetuneRecipe":
    """Return the recipe of a task with the given options."""
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.load import load_recipe
    from exlm_cli.config.tasks import check_task_name, find_suite
    from exlm_cli.tasks.registry import default_recipe

    if suite is None:
        if recipe is None:
            raise ConfigError("give a task, a `--recipe` that names one, or `--resume` to continue a run", _EXAMPLE)
        return load_recipe(recipe, overrides, kind=FinetuneRecipe)
    if find_suite(suite) is not None and name is None:
        if suite == "csv":
            raise ConfigError("which CSV file?", _EXAMPLE)
        names = _names(suite)
        raise ConfigError(
            f"which task of {suite}? There are {', '.join(names)}", f"for example `exlm finetune {suite} {names[0]}`"
        )
    task = suite if name is None or suite == "csv" else f"{suite}/{name}"
    try:
        check_task_name(task)
    except ConfigError as error:
        # a task is given as two words here, not as a key of a recipe
        hint = re.sub(r"`task\.name=(\w+)/(\w+)`", r"`exlm finetune \1 \2`", error.hint)
        raise ConfigError(error.message, hint) from error
    own = [f"task.files.train={json.dumps(name, ensure_ascii=False)}"] if suite == "csv" else []
    return load_recipe(recipe or default_recipe(task), [*own, f"task.name={task}", *overrides], kind=FinetuneRecipe)


def _require_kind(checkpoint: Path, recipe: "FinetuneRecipe") -> None:
    """Refuse a model that reads other rows than the task has, before these are read, which may take long."""
    from exlm_cli.config.load import load_recipe
    from exlm_cli.run_dir import run_directory

    encoder = load_recipe(run_directory(checkpoint) / "recipe.yaml")
    if encoder.data.kind == recipe.task.input_kind:
        return
    from exlm_cli.finetune.model import require_fitting_model

    try:
        require_fitting_model(recipe.task.name, recipe.task.input_kind, encoder, checkpoint, baseline=False)
    except CheckpointError as error:
        if recipe.task.suite != "csv" or recipe.task.input_column is not None:
            raise
        raise CheckpointError(error.message, f"{error.hint}; `task.text_column=NAME` names a column of text") from error


def _find_inputs(
    recipe: "FinetuneRecipe",
    checkpoint: Path | None,
    sets: list[str],
    *,
    use_grid: bool,
    needs_run: bool,
    is_series: bool = False,
    progress: "Progress",
) -> "tuple[DownstreamTask | None, Path | None]":
    """Check what can be checked before torch is loaded; return the task where its file was read, and the checkpoint."""
    from exlm_cli.cli.runs import choose_checkpoint, is_on_hub, local_run
    from exlm_cli.config.finetune import grid_points
    from exlm_cli.run_dir import run_kind
    from exlm_cli.tasks.registry import load_task, require_local_files

    for given in sets:
        if not use_grid and given.strip().startswith(("grid.", "grid=")):
            raise ConfigError(f"`--set {given}` takes effect only with `--grid`", "add `--grid`, or leave it out")
    if not is_series:  # which looks for the files of all its tasks
        require_local_files(recipe.task)
    grid_points(recipe, use_grid=use_grid)
    if needs_run and checkpoint is not None and not is_on_hub(checkpoint):
        checkpoint = local_run(checkpoint, progress)
        if run_kind(checkpoint) == "pretrain":
            _require_kind(checkpoint, recipe)
    # a mistake in the user's own file is found before a checkpoint is looked for
    task = load_task(recipe.task, progress) if recipe.task.name == "csv" else None
    if not needs_run:
        return task, None
    kind = recipe.task.input_kind
    can_do_without = not is_series and recipe.task.suite != "squad"
    scratch = f"; `--from-scratch --encoder {kind}-small` needs none" if can_do_without else ""
    found = choose_checkpoint(
        checkpoint,
        {"SMILES run" if kind == "smiles" else "text run": lambda pretrained: pretrained.data.kind == kind},
        recipe_to_make_one=f"{kind}-small --set data.train=FILE",
        progress=progress,
        instead=scratch,
    )
    return task, found
