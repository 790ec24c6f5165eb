"""Options of the commands that run grids of pre-training runs, and how they become a recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from exlm_cli.cli.options import Device, collect_overrides
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.cells import CellsRecipe

    GridRecipeT = TypeVar("GridRecipeT", bound=CellsRecipe)

NumberT = TypeVar("NumberT", int, float)

SeedsOption = Annotated[
    str | None, typer.Option("--seeds", "--seed", metavar="LIST", help="Seeds of pre-training, like 1,2,3.")
]
TasksOption = Annotated[
    str | None,
    typer.Option("--task", metavar="LIST", help="Tasks to fine-tune on, like glue/mnli,glue/rte; or none."),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, metavar="N", help="Cells at once; default: one a GPU, else one a CPU core."),
]


def collect_grid_overrides(
    sets: list[str] | None, *, seeds: str | None, tasks: str | None, device: Device | None
) -> list[str]:
    """Return `--set` together with the options that stand for a key of a grid's recipe; those win.

    Raises:
        ConfigError: A list that is none.
    """
    overrides = collect_overrides(sets, device=device)
    if seeds is not None:
        numbers = parse_numbers("--seeds", seeds, int, "a whole number from 0 on", 0, 2**63 - 1)
        overrides.append(f"seeds={numbers}")
    if tasks is not None:
        names = [] if tasks == "none" else [name.strip() for name in tasks.split(",")]
        overrides.append(f"tasks=[{', '.join(names)}]")
    return overrides


def load_grid_recipe(
    recipe: str | None,
    resume: Path | None,
    out: Path | None,
    overrides: Sequence[str],
    *,
    kind: "type[GridRecipeT]",
    default: str,
    option: str = "--recipe",
) -> "GridRecipeT":
    """Return the recipe of a new grid, or that of the one to go on with.

    Args:
        recipe: Name or file, as `option` gave it.
        resume: Directory of the grid to go on with.
        out: Directory of a new one.
        overrides: `key=value`.
        kind: Of recipe.
        default: Recipe where none is named.
        option: Which option names the recipe.

    Raises:
        ConfigError: `option` or `--out` together with `--resume`, or a mistake in the recipe.
        CheckpointError: `--resume` names no run directory, or one of another command.
    """
    from exlm_cli.config.load import load_recipe, resumed_recipe

    if resume is None:
        return load_recipe(recipe or default, overrides, kind=kind)
    for name, value in ((option, recipe), ("--out", out)):
        if value is not None:
            raise ConfigError(f"`{name} {value}` does not go with `--resume`", f"the grid goes on in {resume}")
    return resumed_recipe(resume, kind, overrides)


def parse_numbers(
    option: str, text: str | None, kind: type[NumberT], accepted: str, least: float, most: float
) -> list[NumberT] | None:
    """Return the numbers of a list with commas; None where it was not given.

    Raises:
        ConfigError: One of them is none, out of bounds, or given twice.
    """
    if text is None:
        return None
    numbers: list[NumberT] = []
    for word in text.split(","):
        try:
            number = kind(word.strip())
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise ConfigError(f"`{option} {text}`: `{word}` is not {accepted}", "numbers are separated by commas")
        if number in numbers:
            raise ConfigError(f"`{option} {text}` gives {number:g} twice", "give each once")
        numbers.append(number)
    return numbers
