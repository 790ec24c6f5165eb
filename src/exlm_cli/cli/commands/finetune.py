"""`exlm finetune`: fine-tune a checkpoint with several seeds, or search a grid, and score it."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.options import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    OutOption,
    RecipeOption,
    ResumeOption,
    SetOption,
    collect_overrides,
    parse_numbers,
)
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.progress import Progress

_EXAMPLE = "for example `exlm finetune moleculenet bace` or `exlm finetune csv my_assay.csv --label-columns active`"


def finetune(
    suite: Annotated[str | None, typer.Argument(metavar="SUITE", help="moleculenet, glue, squad or csv.")] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The task, like bace or rte; for csv the file.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="RUN", help="Pre-training run; default: the newest fitting.")
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Take its architecture and tokenizer, not its weights.")
    ] = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    seeds: Annotated[str | None, typer.Option("--seeds", "--seed", metavar="LIST", help="Seeds, like 1,2,3.")] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Search the recipe's grid; the best point is reported.")] = False,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="Folder with the task's files; default: fetched.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", metavar="NAME", help="scaffold[-chiral|-balanced|-deepchem], random, file.")
    ] = None,
    smiles_column: Annotated[
        str | None, typer.Option("--smiles-column", metavar="NAME", help="Column of a CSV with the SMILES.")
    ] = None,
    text_column: Annotated[
        str | None, typer.Option("--text-column", metavar="NAME", help="Column of a CSV with the text.")
    ] = None,
    label_columns: Annotated[
        str | None, typer.Option("--label-columns", metavar="LIST", help="Columns of a CSV with labels, like A,B.")
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also score ECFP4 with a random forest on the same molecules.")
    ] = False,
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
    from exlm_cli.config.finetune import grid_points
    from exlm_cli.config.input_paths import check_task_files

    overrides = collect_overrides(sets, device=device)
    numbers = parse_numbers("--seeds", seeds, int, "a whole number from 0 on", 0, 2**63 - 1)
    if numbers is not None:
        overrides.append(f"seeds={numbers}")
    begun = {
        "SUITE": suite, "--recipe": recipe, "--out": out, "--from-scratch": from_scratch or None,
        "--grid": grid or None, "--data-dir": data_dir, "--split": split, "--smiles-column": smiles_column,
        "--text-column": text_column, "--label-columns": label_columns, "--baseline": baseline or None,
    }  # fmt: skip
    if resume is not None:
        resolved = _resumed(resume, begun, overrides)
    else:
        if not grid:
            _refuse_grid(sets or [])
        overrides += _texts(
            {
                "task.data_dir": data_dir,
                "task.split": split,
                "task.smiles_column": smiles_column,
                "task.text_column": text_column,
                "init": "scratch" if from_scratch else None,
            }
        )
        if label_columns is not None:
            columns = [name.strip() for name in label_columns.split(",")]
            overrides.append(f"task.label_columns={json.dumps(columns, ensure_ascii=False)}")
        resolved = _chosen(suite, name, recipe, overrides)
    if dry_run:
        return console.emit_recipe(resolved, as_json=as_json)
    progress = console.open_progress()
    if resume is None:
        # errors that cost nothing to find come before a search for runs and before torch is loaded
        check_task_files(resolved.task)
        grid_points(resolved, use_grid=grid)
        checkpoint = _choose_checkpoint(checkpoint, resolved, progress)
    from exlm_cli.finetune.run import run_finetuning
    from exlm_cli.report.scores import results_table

    result = run_finetuning(
        resolved,
        checkpoint=checkpoint,
        out=out,
        resume=resume,
        use_grid=grid,
        baseline=baseline,
        progress=progress,
    )
    if as_json:
        return console.emit_json({"run_dir": str(result.run_dir), **result.results.as_json()})
    console.emit_renderable(results_table(result.results))
    console.emit_text(f"results: {result.run_dir}/results.json")


def _resumed(run: Path, begun: dict[str, Any], overrides: list[str]) -> "FinetuneRecipe":
    """Return the recipe of a run to continue; options that a run is begun with are refused."""
    for option, value in begun.items():
        if value is not None:
            shown = option if value is True else str(value) if option == "SUITE" else f"{option} {value}"
            raise ConfigError(f"`{shown}` does not go with `--resume`", f"the run in {run} continues as it began")
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.load import resumed_recipe

    return resumed_recipe(run, FinetuneRecipe, overrides)


def _refuse_grid(sets: list[str]) -> None:
    """Refuse values of a grid without `--grid`."""
    for given in sets:
        if given.partition("=")[0].strip().partition(".")[0] == "grid":
            raise ConfigError(f"`--set {given}` takes effect only with `--grid`", "add `--grid`, or leave it out")


def _chosen(suite: str | None, name: str | None, recipe: str | None, overrides: list[str]) -> "FinetuneRecipe":
    """Return the recipe of a task with the given options."""
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.load import load_recipe
    from exlm_cli.config.tasks import SUITES
    from exlm_cli.tasks.registry import default_recipe

    if suite is None:
        if recipe is None:
            raise ConfigError("give a task, a `--recipe` that names one, or `--resume` to continue a run", _EXAMPLE)
        return load_recipe(recipe, overrides, kind=FinetuneRecipe)
    if suite == "csv":
        if name is None:
            raise ConfigError("`exlm finetune csv` needs a file", _EXAMPLE)
        task, own = "csv", [f"task.files.train={json.dumps(name, ensure_ascii=False)}"]
    elif suite in SUITES and name is None:
        names = (task.partition("/")[2] for task in SUITES[suite].tasks)
        raise ConfigError(f"which task of {suite}? There are {', '.join(names)}", _EXAMPLE)
    else:
        task, own = _task_name(suite, name), []
    own.append(f"task.name={task}")
    return load_recipe(recipe or default_recipe(task), [*own, *overrides], kind=FinetuneRecipe)


def _task_name(suite: str, name: str | None) -> str:
    """Return `suite/name` of a task that there is."""
    from exlm_cli.config.tasks import check_task_name

    task = suite if name is None else f"{suite}/{name}"
    try:
        check_task_name(task)
    except ConfigError as error:
        # a task is given as two words here, not as a key of a recipe
        hint = re.sub(r"`task\.name=(\w+)/(\w+)`", r"`exlm finetune \1 \2`", error.hint)
        raise ConfigError(error.message, hint) from error
    return task


def _choose_checkpoint(given: Path | None, recipe: "FinetuneRecipe", progress: "Progress") -> Path:
    from exlm_cli.cli.checkpoints import choose_checkpoint

    kind = recipe.task.input_kind
    return choose_checkpoint(
        given,
        {"SMILES run" if kind == "smiles" else "text run": lambda pretrained: pretrained.data.kind == kind},
        recipe_to_make_one=f"quickstart-{kind}",
        progress=progress,
    )


def _texts(values: dict[str, str | None]) -> list[str]:
    """Return overrides of keys with text values, quoted so that YAML does not interpret them."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]
