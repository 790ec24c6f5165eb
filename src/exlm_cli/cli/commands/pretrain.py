"""`exlm pretrain`: train a recipe, or continue a run."""

from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    OnInvalidOption,
    OutOption,
    RecipeOption,
    ResumeOption,
    SeedOption,
    SetOption,
    collect_overrides,
    refuse_with_resume,
)
from exlm_cli.errors import ConfigError
from exlm_cli.launch import is_quiet
from exlm_cli.paths import expand_path

BeginOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="RUN",
        parser=expand_path,
        help="Begin with these weights: a pre-training run, bundled:NAME, hub:OWNER/NAME, or hf:FOLDER-OR-NAME, a "
        "masked LM of transformers; default: weights drawn from the seed.",
    ),
]


def pretrain(
    recipe: RecipeOption = None,
    checkpoint: BeginOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    on_invalid: OnInvalidOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Pre-train ExLM or its MLM baseline from a recipe, or begin with the weights of another model.

    With `--checkpoint` the architecture and the tokenizer are the checkpoint's, the rest is the recipe's. Tokenises the
    data first if that has not been done. Ctrl-C saves a checkpoint and prints how to continue.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import draw_curves, emit_dry_run
    from exlm_cli.config.load import load_recipe, resumed_recipe
    from exlm_cli.config.pretrain import PretrainRecipe

    overrides = collect_overrides(sets, {"seed": seed, "device": device, "data.on_invalid": on_invalid})
    if (recipe is None) == (resume is None):
        raise ConfigError(
            "give either `--recipe` to start a run or `--resume` to continue one",
            "for example `exlm pretrain --recipe quickstart-text`; `exlm recipes` lists the recipes",
        )
    refuse_with_resume(resume, {"--out": out, "--checkpoint": checkpoint})
    if resume is not None:
        resolved = resumed_recipe(resume, PretrainRecipe, overrides)
    else:
        assert recipe is not None, "one of the two is given"
        resolved = load_recipe(recipe, overrides)
    if dry_run:
        return emit_dry_run(resolved, as_json=as_json, checkpoint=checkpoint)
    from exlm_cli.cli.runs import local_run
    from exlm_cli.report.scores import describe_validation
    from exlm_cli.train.pretrain import run_pretraining

    progress = console.open_progress()
    start = None if checkpoint is None else local_run(checkpoint, progress, resolved.data.kind)
    result = run_pretraining(resolved, out=out, resume=resume, checkpoint=start, progress=progress)
    if is_quiet():
        return None  # rank 0 draws and prints
    metrics = result.run_dir / "metrics.jsonl"
    if not metrics.is_file():
        progress.message(f"{metrics} is missing, so no curves are drawn")
    drawn = draw_curves([result.run_dir], result.run_dir / "report" / "curves") if metrics.is_file() else []
    if as_json:
        return console.emit_json(
            {
                "run_dir": result.run_dir,
                "checkpoint": result.checkpoint,
                "steps": result.steps,
                "elapsed_s": round(result.elapsed_s, 3),
                "metrics": result.metrics,
                "figures": drawn,
            }
        )
    figures = {f"validation {heading}": value for heading, value in describe_validation(result.metrics).items()}
    curves = {"curves": drawn[0]} if drawn else {}
    console.emit_pairs(
        {"run": result.run_dir, "checkpoint": result.checkpoint, "steps": result.steps, **figures, **curves}
    )
