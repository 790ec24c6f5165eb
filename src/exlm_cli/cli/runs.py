"""Runs that a command is given: their kinds, and names that tell them apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.run_dir import RUN_FILE, read_run_json, run_directory

RunKind = Literal["pretrain", "finetune"]


@dataclass(frozen=True)
class GivenRun:
    """A run as the user gave it.

    Attributes:
        path: Run directory or one of its `checkpoints/step-N`.
        kind: The command that made it.
        name: Its name in tables.
    """

    path: Path
    kind: RunKind
    name: str

    @property
    def report(self) -> Path:
        """Folder of the run for reports."""
        return run_directory(self.path) / "report"


def given_runs(paths: Sequence[Path]) -> list[GivenRun]:
    """Return runs with their kinds and names.

    Raises:
        CheckpointError: One is no run of `exlm pretrain` or `exlm finetune`.
        ConfigError: One is given twice.
    """
    kinds = [run_kind(path) for path in paths]
    return [GivenRun(*run) for run in zip(paths, kinds, name_runs(paths), strict=True)]


def run_kind(path: Path) -> RunKind:
    """Return which command made a run.

    Raises:
        CheckpointError: It is no run directory, or one of another command.
    """
    run = run_directory(path)
    if not (run / RUN_FILE).is_file():
        reason = "no such run directory" if not run.exists() else f"not a run directory: it has no {RUN_FILE}"
        raise CheckpointError(f"{path}: {reason}", "give a run directory of `exlm pretrain` or `exlm finetune`")
    match read_run_json(run).command:
        case "pretrain":
            return "pretrain"
        case "finetune":
            return "finetune"
        case other:
            raise CheckpointError(
                f"{path}: a run of `exlm {other}`, not of `exlm pretrain` or `exlm finetune`",
                "the cells of a sweep, under its cells/, are such runs",
            )


def name_runs(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: the last part of its path, more parts where two are alike.

    Raises:
        ConfigError: A run is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for path, whole in zip(paths, resolved, strict=True):
        if resolved.count(whole) > 1:
            raise ConfigError(f"{path} is given twice", "give each run once")
    # `mine/step-30`, not `mine/checkpoints/step-30`
    parts = [[part for part in path.parts if part != "checkpoints"] for path in resolved]
    names = []
    for path, own in zip(resolved, parts, strict=True):
        others = [other for other in parts if other is not own]
        num_parts = 2 if run_directory(path) != path else 1
        while num_parts < len(own) and any(own[-num_parts:] == other[-num_parts:] for other in others):
            num_parts += 1
        names.append("/".join(own[-num_parts:]))
    return names
