"""Run arguments of commands: kind and name of each run, and the newest run that fits as the default."""

import contextlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from exlm_cli.bundled_models import bundled_name, bundled_runs, given_name, report_folder
from exlm_cli.config.input_paths import SCHEMES
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.tasks import InputKind
from exlm_cli.errors import CheckpointError, ConfigError, ExlmError
from exlm_cli.export.given import is_on_hub, local_run
from exlm_cli.format import format_count, format_parameters, name_some
from exlm_cli.progress import Progress
from exlm_cli.report.learned import find_unlearned
from exlm_cli.run_dir import (
    RUNS_ROOT,
    SERIES_FILE,
    find_newest_run,
    is_checkpoint,
    read_run_json,
    resume_command,
    run_directory,
    run_kind,
)

_QUICKSTART = "quickstart-"
"""Begins the names of recipes that show a training in minutes, of models that are of no further use."""


@dataclass(frozen=True)
class GivenRun:
    """A run as the user gave it.

    Attributes:
        path: Run directory or one of its `checkpoints/step-N`.
        kind: The command that made it, `pretrain` or `finetune`.
        name: Its name in tables.
    """

    path: Path
    kind: str
    name: str

    @property
    def report(self) -> Path:
        """Folder for reports on the run."""
        return report_folder(self.path)


def runs_of_series(folder: Path) -> list[Path]:
    """Return the finished runs of a folder of `exlm finetune SUITE all`; any other path by itself.

    Raises:
        CheckpointError: The folder has no finished run.
    """
    if not (folder / SERIES_FILE).is_file():
        return [folder]
    finished = [path.parent for path in sorted(folder.glob("*/results.json"))]
    if not finished:
        raise CheckpointError(
            f"{folder}: none of its runs is finished", f"finish them with `{resume_command('finetune', folder)}`"
        )
    return finished


def given_runs(paths: Sequence[Path], progress: Progress) -> list[GivenRun]:
    """Return runs with their kinds and names, those of the Hub as copies in the cache.

    Raises:
        CheckpointError: One is not a run of `exlm pretrain` or `exlm finetune`.
        ConfigError: One is given twice.
    """
    local = [local_run(path, progress) for path in paths]
    return [GivenRun(path, run_kind(path), name) for path, name in zip(local, name_runs(local), strict=True)]


def name_runs(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: the last part of its path, more parts where two are alike; or `bundled:NAME`.

    Raises:
        ConfigError: A run is given twice.
    """
    resolved = [Path(os.path.realpath(path)) for path in paths]  # Path.resolve raises for a link to itself
    for path, whole in zip(paths, resolved, strict=True):
        if resolved.count(whole) > 1:
            raise ConfigError(f"{path} is given twice", "give each run once")
    # `mine/step-30`, not `mine/checkpoints/step-30`
    parts = [
        [part for part in path.parts if part != "checkpoints"] if name is None else [name]
        for path, name in zip(resolved, map(given_name, paths), strict=True)
    ]
    names = []
    for path, own in zip(resolved, parts, strict=True):
        others = [other for other in parts if other is not own]
        num_parts = 2 if run_directory(path) != path else 1
        while num_parts < len(own) and any(own[-num_parts:] == other[-num_parts:] for other in others):
            num_parts += 1
        names.append("/".join(own[-num_parts:]))
    return names


def choose_checkpoint(
    given: Path | None,
    fits_by_kind: Mapping[str, Callable[[PretrainRecipe], bool]],
    recipe_to_make_one: str,
    progress: Progress,
    instead: str = "",
    kind_of_rows: InputKind = "text",
) -> Path:
    """Return the checkpoint that was given, or else the newest finished pre-training run that fits, or a bundled one.

    Runs of quickstart recipes, and runs that learned nothing, are passed over. A message says which is taken, with its
    size and its data, and another which was passed over and why. Where the package brings none that fits, the newest
    run is taken even if it is one of these, and a message says which sort it is.

    Args:
        given: `--checkpoint`.
        fits_by_kind: Description of a kind of run -> whether a recipe is of it. The first kind with any run is taken;
            the error names the last.
        recipe_to_make_one: Recipe that makes such a run, for the hint.
        progress: Prints the messages.
        instead: End of the hint: what to do without a run.
        kind_of_rows: What a model of transformers reads.

    Raises:
        CheckpointError: None was given and none fits.
    """
    if given is not None:
        if not is_on_hub(given):
            _say_if_unfinished(given, progress)
        return local_run(given, progress, kind_of_rows)
    for kind, fits in fits_by_kind.items():
        passed_over: dict[Path, str] = {}
        finished = partial(_is_worth_it, fits=fits, passed_over=passed_over)
        any_run = partial(_is_pretrained, fits=fits, is_finished=False)
        for found, why in (
            (find_newest_run(RUNS_ROOT, finished), f"the newest finished {kind}"),
            (next(filter(any_run, bundled_runs()), None), "which the package brings"),
            (find_newest_run(RUNS_ROOT, any_run), f"the newest {kind}"),
        ):
            if found is not None:
                progress.message(f"checkpoint: {bundled_name(found) or found}, {why}{_describe(found)}")
                _say_if_unfinished(found, progress)
                _say_if_passed_over(found, passed_over, progress)
                return found
    raise _no_run(f"no `--checkpoint` was given, and there is no {[*fits_by_kind][-1]}", recipe_to_make_one, instead)


def _describe(run: Path) -> str:
    """Return size and data of a pre-training run: `, 4.7 M parameters, trained on wiki.txt`."""
    described, recipe = read_run_json(run), load_recipe(run / "recipe.yaml")
    size = "" if described.parameters is None else f", {format_parameters(described.parameters)} parameters"
    # files without the folders that they were read in
    names = (given if given.startswith(SCHEMES) else Path(given).name for given in recipe.data.train)
    data = described.trained_on or name_some(names, limit=3)
    return f"{size}, trained on {data}" if data else size


def _say_if_unfinished(checkpoint: Path, progress: Progress) -> None:
    """Report how far a pre-training run came that was not trained to its end, but of those in the package."""
    run = run_directory(checkpoint)
    if bundled_name(run) is not None:
        return
    with contextlib.suppress(ExlmError):  # a damaged run is explained where it is read
        described = read_run_json(run)
        if described.command != "pretrain" or described.steps is not None:
            return
        total = load_recipe(run / "recipe.yaml").train.max_steps
        saved = [checkpoint] if is_checkpoint(checkpoint) else (run / "checkpoints").glob("step-*")
        steps = [int(step) for path in saved if (step := path.name.removeprefix("step-")).isdecimal()]
        of_total = "" if total is None else f" of {format_count(total)}"
        progress.message(
            f"note: {checkpoint} is at step {format_count(max(steps, default=0))}{of_total}; "
            f"`{resume_command('pretrain', run)}` finishes the run"
        )


def _say_if_passed_over(taken: Path, passed_over: Mapping[Path, str], progress: Progress) -> None:
    """Report the newest run that was passed over, or why the run that is taken is a poor one."""
    if taken in passed_over:
        progress.message(f"note: {taken} {passed_over[taken]}")
    elif passed_over:
        run, why = next(iter(passed_over.items()))
        progress.message(f"note: {run} is passed over: it {why}; `--checkpoint {shlex.quote(str(run))}` takes it")


def newest_run(*, takes_all: bool, progress: Progress) -> Path:
    """Return the newest run that can be scored and print its path; cells of a sweep are left out.

    Args:
        takes_all: Whether finished fine-tunings, and sweeps with a finished cell, fit besides pre-trainings.
        progress: Prints the path.

    Raises:
        CheckpointError: There is none.
    """
    newest = find_newest_run(RUNS_ROOT, partial(_is_scorable, takes_all=takes_all))
    if newest is None:
        raise _no_run("no run was given, and there is none", "quickstart-text")
    progress.message(f"run: {newest}, the newest one")
    return newest


def _no_run(missing: str, recipe_to_make_one: str, instead: str = "") -> CheckpointError:
    return CheckpointError(
        f"{missing} with a checkpoint under {RUNS_ROOT}/",
        f"make one with `exlm pretrain --recipe {recipe_to_make_one}`{instead}; a cell of a sweep is given by its path",
    )


def _is_scorable(run: Path, *, takes_all: bool) -> bool:
    from exlm_cli.experiments.results import is_sweep_run
    from exlm_cli.finetune.results import RESULTS_FILE
    from exlm_cli.finetune.scores import SCORES_FILE

    try:
        command = read_run_json(run).command
        if is_sweep_run(run):
            return takes_all and any(run.glob(f"cells/*/*/{SCORES_FILE}"))
    except ExlmError:
        return False  # a damaged run is left out
    is_finished = takes_all and command == "finetune" and (run / RESULTS_FILE).is_file()
    return is_finished or (command == "pretrain" and _has_checkpoint(run))


def _is_pretrained(run: Path, *, fits: Callable[[PretrainRecipe], bool], is_finished: bool) -> bool:
    try:
        described = read_run_json(run)
        is_pretraining = described.command == "pretrain" and _has_checkpoint(run)
        # pre-training writes its steps at its end
        is_wanted = is_pretraining and (described.steps is not None or not is_finished)
        return is_wanted and fits(load_recipe(run / "recipe.yaml"))
    except ExlmError:
        return False  # a damaged run is left out


def _is_worth_it(run: Path, *, fits: Callable[[PretrainRecipe], bool], passed_over: dict[Path, str]) -> bool:
    """Return whether a run is a finished one to begin with by itself; add one that is not to those passed over."""
    if not _is_pretrained(run, fits=fits, is_finished=True):
        return False
    recipe = load_recipe(run / "recipe.yaml")
    why = None
    if recipe.name.startswith(_QUICKSTART):
        why = f"is a quickstart, of the recipe {recipe.name}"
    else:
        with contextlib.suppress(CheckpointError):  # metrics that are damaged say nothing
            losses = find_unlearned(run, recipe.data.kind)
            why = None if losses is None else f"has learned nothing of contexts: {losses}"
    if why is not None:
        passed_over[run] = why
    return why is None


def _has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*"))
