"""`exlm pretrain`: train a recipe, or continue a run."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from exlm_cli.distributed.launch import is_quiet
from exlm_cli.errors import ConfigError
from exlm_cli.format import format_bytes, format_duration, format_percent
from exlm_cli.paths import expand_path
from exlm_cli.run_dir import METRICS_FILE

BeginOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="RUN",
        parser=expand_path,
        help="Begin with these weights: a pre-training run, bundled:NAME, hub:OWNER/NAME, or hf:FOLDER-OR-NAME, a "
        "masked LM or encoder of transformers; default: weights drawn from the seed.",
    ),
]

ProfileOption = Annotated[
    int | None,
    typer.Option(
        "--profile",
        metavar="N",
        min=1,
        help="Also trace N steps with torch's profiler, into profile/ of the run, for ui.perfetto.dev or "
        "chrome://tracing.",
    ),
]

if TYPE_CHECKING:
    from exlm_cli.config.pretrain import PretrainRecipe
    from exlm_cli.progress import Progress
    from exlm_cli.train.pretrain import PretrainResult


def pretrain(
    recipe: RecipeOption = None,
    checkpoint: BeginOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    on_invalid: OnInvalidOption = None,
    profile: ProfileOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Pre-train ExLM or its MLM baseline from a recipe, or begin with the weights of another model.

    With `--checkpoint` the architecture and the tokenizer are the checkpoint's, the rest is the recipe's. Tokenises the
    data first if that has not been done, and validates before the first step, so that the verdict tells what the
    training changed. Ctrl-C saves a checkpoint and prints how to continue.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import emit_dry_run
    from exlm_cli.config.load import load_recipe, resumed_recipes
    from exlm_cli.config.pretrain import PretrainRecipe

    overrides = collect_overrides(sets, {"seed": seed, "device": device, "data.on_invalid": on_invalid})
    if (recipe is None) == (resume is None):
        raise ConfigError(
            "give either `--recipe` to start a run or `--resume` to continue one",
            "for example `exlm pretrain --recipe quickstart-text`; `exlm recipes` lists the recipes",
        )
    refuse_with_resume(resume, {"--out": out, "--checkpoint": checkpoint})
    begun = None
    if resume is not None:
        begun, resolved = resumed_recipes(resume, PretrainRecipe, overrides)
    else:
        assert recipe is not None, "one of the two is given"
        resolved = load_recipe(recipe, overrides)
    if dry_run:
        return emit_dry_run(resolved, as_json=as_json, checkpoint=checkpoint)
    from exlm_cli.export.given import local_run
    from exlm_cli.train.pretrain import run_pretraining
    from exlm_cli.train.records.profiler import StepProfiler

    progress = console.open_progress()
    start = None if checkpoint is None else local_run(checkpoint, progress, resolved.data.kind)
    callbacks = [] if profile is None else [StepProfiler(profile, progress)]
    result = run_pretraining(
        resolved, out=out, resume=resume, begun=begun, checkpoint=start, callbacks=callbacks, progress=progress
    )
    if not is_quiet():  # rank 0 draws and prints
        _report(result, checkpoint, progress, as_json=as_json)


def _report(result: "PretrainResult", checkpoint: Path | None, progress: "Progress", *, as_json: bool) -> None:
    """Draw the curves of a finished run, and print where it is, what it learned, and what to do next."""
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import draw_curves
    from exlm_cli.report.learned import describe_learned

    drawn = []
    if (result.run_dir / METRICS_FILE).is_file():
        drawn = draw_curves([result.run_dir], result.run_dir / "report" / "curves")
    else:
        progress.message(f"{result.run_dir / METRICS_FILE} is missing, so no curves are drawn")
    learned = describe_learned(
        result.metrics,
        result.unigrams.loss,
        result.unigrams.accuracy,
        num_tokens=result.num_tokens,
        num_parameters=result.num_parameters,
        kind=result.recipe.data.kind,
        before=result.before,
    )
    sentences = [] if learned is None else learned.sentences()
    if as_json:
        return console.emit_json(
            {
                "run_dir": result.run_dir,
                "checkpoint": result.checkpoint,
                "steps": result.steps,
                "elapsed_s": round(result.elapsed_s, 3),
                "data_wait_s": round(result.data_wait_s, 3),
                "peak_memory_bytes": result.peak_memory_bytes,
                "gpu": None if result.gpu is None else result.gpu.product,
                "utilisation": result.utilisation,
                "metrics": result.metrics,
                "before": result.before,
                "unigrams": {"loss": result.unigrams.loss, "accuracy": result.unigrams.accuracy},
                "learned": sentences,
                "figures": drawn,
            }
        )
    found = {"run": result.run_dir, "checkpoint": result.checkpoint, "steps": result.steps}
    measures = {} if learned is None else learned.measures()
    console.emit_pairs({**found, **measures, **_watched(result), **({"curves": drawn[0]} if drawn else {})})
    for number, sentence in enumerate(sentences):
        console.emit_sentence(sentence if number else f"learned: {sentence}")
    is_begun = learned is None or not learned.is_at_unigrams
    command = _next_command(result.recipe, result.run_dir) if is_begun else _longer(result, checkpoint)
    console.emit_line(f"next: {command}")


def _watched(result: "PretrainResult") -> dict[str, str]:
    """Return what the training took of the machine, as people read it."""
    time = f"{format_duration(result.elapsed_s)} in steps, {result.data_wait_s:.1f} s of it waiting for data"
    pairs = {"time": time, "peak memory": format_bytes(result.peak_memory_bytes)}
    if result.gpu is not None and result.utilisation is not None:
        peak = f"{result.gpu.peak_flops / 1e12:g} TFLOP/s of the {result.gpu.product}"
        pairs["utilisation"] = f"{format_percent(result.utilisation)} of the {peak}"
    return pairs


def _longer(result: "PretrainResult", checkpoint: Path | None) -> str:
    """Return how to train a model again that has learned nothing yet, ten times as long."""
    train = result.recipe.train
    limits = {"train.max_steps": train.max_steps, "train.max_epochs": train.max_epochs}
    longer = "".join(f" --set {key}={10 * limit}" for key, limit in limits.items() if limit is not None)
    begin = "" if checkpoint is None else f" --checkpoint {shlex.quote(str(checkpoint))}"
    given = shlex.quote(str(result.run_dir / "recipe.yaml"))
    return f"exlm pretrain --recipe {given}{begin}{longer}"


def _next_command(recipe: "PretrainRecipe", run: Path) -> str:
    """Return what to do with a finished run: show its DAG of a text, or fine-tune it on molecules."""
    given = f"--checkpoint {shlex.quote(str(run))}"
    # copies of a token have no DAG
    if recipe.data.kind == "text" and recipe.masking.num_repeats == 1:
        return f'exlm inspect-dag "a text with a [MASK] in it" {given}'
    if recipe.data.kind == "text":
        return f"exlm finetune glue rte {given}"
    return f"exlm finetune csv FILE --label-columns NAME {given}"
