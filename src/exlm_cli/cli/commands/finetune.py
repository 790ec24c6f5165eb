"""`exlm finetune`: fine-tune a checkpoint with several seeds, or search a grid, and score it."""

import json
import re
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
    collect_overrides,
    parse_seeds,
    refuse_with_resume,
    split_words,
)
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.progress import Progress

_EXAMPLE = "for example `exlm finetune moleculenet bace` or `exlm finetune csv my_assay.csv --label-columns active`"

SuiteArgument = Annotated[str | None, typer.Argument(metavar="SUITE", help="moleculenet, glue, squad or csv.")]
TaskArgument = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The task, like bace or rte; for csv the file.")
]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", metavar="RUN", help="Pre-training run; default: the newest fitting.")
]
ScratchOption = Annotated[
    bool, typer.Option("--from-scratch", help="Take its architecture and tokenizer, not its weights.")
]
SeedsOption = Annotated[str | None, typer.Option("--seeds", "--seed", metavar="LIST", help="Seeds, like 1,2,3.")]
GridOption = Annotated[bool, typer.Option("--grid", help="Search the recipe's grid; the best point is reported.")]
DataDirOption = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help="Folder with the task's files; default: fetched.")
]
SplitOption = Annotated[
    str | None, typer.Option("--split", metavar="NAME", help="scaffold[-chiral|-balanced|-deepchem], random, file.")
]
LabelColumnsOption = Annotated[
    str | None, typer.Option("--label-columns", metavar="LIST", help="Columns of a CSV with labels, like A,B.")
]
BaselineOption = Annotated[
    bool, typer.Option("--baseline", help="Also score ECFP4 with a random forest on the same molecules.")
]


def finetune(
    suite: SuiteArgument = None,
    name: TaskArgument = None,
    checkpoint: CheckpointOption = None,
    from_scratch: ScratchOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    seeds: SeedsOption = None,
    grid: GridOption = False,
    data_dir: DataDirOption = None,
    split: SplitOption = None,
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    label_columns: LabelColumnsOption = None,
    baseline: BaselineOption = False,
    out: OutOption = None,
    resume: ResumeOption = None,
    device: DeviceOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a checkpoint on a task and score it.

    One fine-tuning for each seed. The epoch with the best validation score is scored once on the test split. A run that
    was stopped continues with `--resume RUN`; finished seeds and grid points are kept.
    """
    from exlm_cli.cli import console
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.load import resumed_recipe

    task = {
        "task.data_dir": data_dir,
        "task.split": split,
        "task.smiles_column": smiles_column,
        "task.text_column": text_column,
        "task.label_columns": split_words(label_columns),
    }
    start = {"suite": suite, "recipe": recipe, "out": out, "from_scratch": from_scratch, "use_grid": grid}
    refuse_with_resume(resume, {**start, **task, "baseline": baseline})
    options = {"device": device, "seeds": parse_seeds(seeds), **task, "init": "scratch" if from_scratch else None}
    overrides = collect_overrides(sets, options)
    if resume is None:
        resolved = _chosen(suite, name, recipe, overrides)
    else:
        resolved = resumed_recipe(resume, FinetuneRecipe, overrides)
    if dry_run:
        return console.emit_recipe(resolved, as_json=as_json)
    progress = console.open_progress()
    if resume is None:
        checkpoint = _find_inputs(resolved, checkpoint, sets or [], use_grid=grid, progress=progress)
    from exlm_cli.finetune.run import run_finetuning

    result = run_finetuning(
        resolved, checkpoint=checkpoint, out=out, resume=resume, use_grid=grid, baseline=baseline, progress=progress
    )
    from exlm_cli.report.scores import results_table

    if as_json:
        return console.emit_json({"run_dir": result.run_dir, **result.results.as_json()})
    console.emit_renderable(results_table(result.results))
    console.emit_text(f"results: {result.run_dir}/results.json")


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
    section = find_suite(suite)
    if section is not None and name is None:
        names = (task.partition("/")[2] for task in section.tasks)
        raise ConfigError(
            "which CSV file?" if suite == "csv" else f"which task of {suite}? There are {', '.join(names)}", _EXAMPLE
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


def _find_inputs(
    recipe: "FinetuneRecipe", checkpoint: Path | None, sets: list[str], *, use_grid: bool, progress: "Progress"
) -> Path:
    """Check what costs nothing to check before torch is loaded, and return the checkpoint."""
    from exlm_cli.cli.runs import choose_checkpoint
    from exlm_cli.config.finetune import grid_points
    from exlm_cli.config.input_paths import check_task_files

    for given in sets:
        if not use_grid and given.strip().startswith(("grid.", "grid=")):
            raise ConfigError(f"`--set {given}` takes effect only with `--grid`", "add `--grid`, or leave it out")
    check_task_files(recipe.task)
    grid_points(recipe, use_grid=use_grid)
    kind = recipe.task.input_kind
    return choose_checkpoint(
        checkpoint,
        {"SMILES run" if kind == "smiles" else "text run": lambda pretrained: pretrained.data.kind == kind},
        recipe_to_make_one=f"quickstart-{kind}",
        progress=progress,
    )
