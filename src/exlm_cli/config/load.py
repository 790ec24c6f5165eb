"""Loading of recipes by name, file or run directory, with what they extend and overrides."""

import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import yaml
from pydantic import BaseModel

from exlm_cli.bundled_models import bundled_name, is_bundled_name
from exlm_cli.config.base import Recipe
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.overrides import (
    Layer,
    RecipeT,
    check_recipe,
    merge,
    parse_override,
    recipe_sections,
    refuse_decided,
)
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.config.yaml import describe_yaml_error, dump_yaml, parse_yaml
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.paths import expand_path
from exlm_cli.run_dir import RUN_FILE, damage_hint, is_beginning, read_run_json, require_run, resume_command

KINDS: tuple[type[Recipe], ...] = (PretrainRecipe, SweepRecipe, FinetuneRecipe)
"""Every kind of recipe. A new command that takes recipes adds its kind here."""

_COMMANDS = {kind.command: kind for kind in KINDS}
"""`command` of a recipe -> its kind."""

_OWN_KEYS = ("name", "purpose", "paper")
"""Keys that a recipe does not inherit from the one it extends; a recipe without `name` is named by its file."""

_MEANING_WIDTH = 80

_LIST_HINT = "`exlm recipes` lists the recipes; a file is given by its path, like `./mine.yaml`"


@overload
def load_recipe(name_or_file: str | Path, overrides: Sequence[str] = ()) -> PretrainRecipe: ...
@overload
def load_recipe(name_or_file: str | Path, overrides: Sequence[str] = (), *, kind: type[RecipeT]) -> RecipeT: ...
def load_recipe(
    name_or_file: str | Path, overrides: Sequence[str] = (), *, kind: type[Recipe] = PretrainRecipe
) -> Recipe:
    """Read a recipe, apply what it extends and then `overrides`, and check it.

    Args:
        name_or_file: Name of a recipe that ships with the package, or path of a YAML file. A `Path` is never a name,
            and its `~` is a character like any other.
        overrides: `section.key=value`, the value in YAML; later ones win.
        kind: Kind of recipe to read.

    Raises:
        ConfigError: Unknown recipe or key, unreadable file, a value that is not accepted, a circle of `extends`, a
            recipe of another kind.
        DataError: The path has a NUL character, or begins with the home of an unknown user.
    """
    return _load(_find_recipe(name_or_file, kind), overrides, kind)[1]


def _load(path: Path, overrides: Sequence[str], kind: type[RecipeT]) -> tuple[RecipeT | None, RecipeT]:
    """Return the recipe in a file, which is checked alone if it is that of a run, and the same with overrides."""
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise ConfigError(f"overrides are {overrides!r}, not a list of strings", "for example `['optim.lr=1e-4']`")
    damaged, begun = damage_hint(path), None
    try:
        layers = _read_kind(path, kind)
        if damaged:  # nobody writes the recipe of a run by hand; mistakes in overrides have hints of their own
            begun = check_recipe(layers, _shown(path), kind)
    except ConfigError as error:
        raise ConfigError(error.message, damaged or error.hint) from error
    given = [parse_override(override, kind) for override in overrides]
    layers += given
    if issubclass(kind, SweepRecipe) and merge(layers).get("cells"):
        for layer in given:
            refuse_decided(layer, kind.decided_by_cells, "repeat-mlm")
    return begun, check_recipe(layers, _shown(path), kind)


def dump_recipe(recipe: Recipe, *, with_meanings: bool = False) -> str:
    """Return a recipe, defaults included, as YAML that `load_recipe` reads back as the same recipe.

    With `with_meanings`, a comment before each key has its meaning.
    """
    own = f"# The command that takes this recipe: {', '.join(_COMMANDS)}\ncommand: {recipe.command}\n"
    return own + "".join(_describe_keys(recipe, "")) if with_meanings else dump_yaml(recipe.as_written())


def _describe_keys(section: BaseModel, indent: str) -> Iterator[str]:
    """Yield the keys of a recipe or section, each with its meaning, and those of its sections."""
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        inner = getattr(section, name)
        if isinstance(inner, BaseModel):
            yield f"\n{indent}{name}:\n"
            yield from _describe_keys(inner, f"{indent}  ")
        else:
            meaning = textwrap.wrap(field.description or "", _MEANING_WIDTH - 2 - len(indent))
            comment = "".join(f"# {line}\n" for line in meaning)
            yield textwrap.indent(comment + dump_yaml({name: values[name]}), indent)


def list_recipes(kind: type[Recipe]) -> dict[str, Path]:
    """Return name -> file of the shipped recipes of a kind, by folder in the order of its `groups`, then by name."""
    order = {group: rank for rank, group in enumerate(kind.groups)}
    files = {path.stem: path for path in (recipes_folder() / kind.command).rglob("*.yaml")}
    return dict(sorted(files.items(), key=lambda item: (order.get(item[1].parent.name, len(order)), item[0])))


def resumed_recipe(run: Path, kind: type[RecipeT], overrides: Sequence[str] = ()) -> RecipeT:
    """Return the recipe of a run to continue, with overrides; arguments and errors of `resumed_recipes`."""
    return resumed_recipes(run, kind, overrides)[1]


def resumed_recipes(run: Path, kind: type[RecipeT], overrides: Sequence[str] = ()) -> tuple[RecipeT, RecipeT]:
    """Return the recipe of a run to continue, as it is and with overrides, from one reading of its recipe.yaml.

    `kind` is the kind that the command takes.

    Raises:
        CheckpointError: `run` is not a run directory, is one of another command, or a model of the package.
        ConfigError: recipe.yaml is damaged, or an override is not accepted.
    """
    if (bundled := str(run) if is_bundled_name(run) else bundled_name(run)) is not None:
        raise CheckpointError(
            f"`{bundled}` cannot be continued: the package brings its weights, without the state of the optimizer",
            f"`exlm finetune --checkpoint {bundled}` begins with it",
        )
    commands = (kind.command, "repeat-mlm") if issubclass(kind, SweepRecipe) else (kind.command,)
    named = " or ".join(f"`exlm {command}`" for command in commands)
    if is_beginning(run):
        raise CheckpointError(
            f"{run}: the run was stopped before it had anything to continue",
            "give the command that it began with again, which takes this folder",
        )
    require_run(run, "recipe.yaml", RUN_FILE, hint=f"give the directory that {named} named")
    command = read_run_json(run).command
    if command not in commands:
        raise CheckpointError(
            f"{run}: a run of `exlm {command}`, not of {named}",
            f"`{resume_command(command, run)}` continues it",
        )
    begun, recipe = _load(run / "recipe.yaml", overrides, kind)
    assert begun is not None, "the folder is a run's"
    return begun, recipe


def recipe_kind(name_or_file: str) -> type[Recipe]:
    """Return the kind of a recipe, by its `command`.

    Raises:
        ConfigError: Unknown recipe, unreadable file, a circle of `extends`.
    """
    path = _find_recipe(name_or_file, Recipe)
    return _told_kind(_read_layers(path, Recipe), path)


def recipes_folder() -> Path:
    """Return the folder of shipped recipes: inside the installed package, or at the top of a source checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def _shown(path: Path) -> str:
    """Return a path for messages: shipped recipes from the top of the repository."""
    folder = recipes_folder()
    return f"recipes/{path.relative_to(folder).as_posix()}" if path.is_relative_to(folder) else str(path)


def _find_recipe(name_or_file: str | Path, kind: type[Recipe], extended_by: Path | None = None) -> Path:
    """Return the path of a recipe; in `extends` of the file `extended_by`, relative paths start beside that file."""
    shipped = {} if isinstance(name_or_file, Path) else list_recipes(kind)
    if name_or_file in shipped:
        return shipped[name_or_file]
    path = name_or_file if isinstance(name_or_file, Path) else expand_path(name_or_file)
    if extended_by is not None:
        path = extended_by.parent / path
    if path.is_file():
        return path
    prefix = "" if extended_by is None else f"{_shown(extended_by)}: `extends`: "
    if path.is_dir():
        inside = path / "recipe.yaml"
        hint = f"the recipe of that run is {inside}" if inside.is_file() else _LIST_HINT
        raise ConfigError(f"{prefix}{path} is a directory; a recipe is a YAML file", hint)
    if path.suffix in (".yaml", ".yml") or len(Path(name_or_file).parts) > 1:
        raise ConfigError(f"{prefix}recipe file {path} does not exist", _LIST_HINT)
    for other in KINDS:
        if name_or_file in list_recipes(other):
            raise _other_kind(f"{prefix}`{name_or_file}`", other, kind)
    near = difflib.get_close_matches(str(name_or_file), shipped, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`? {_LIST_HINT}" if near else _LIST_HINT
    raise ConfigError(f"{prefix}unknown recipe `{name_or_file}`", hint)


def _other_kind(described: str, other: type[Recipe], kind: type[Recipe]) -> ConfigError:
    return ConfigError(
        f"{described} is a recipe of `exlm {other.command}`, not of `exlm {kind.command}`",
        f"`exlm {other.command}` takes it; {_LIST_HINT}",
    )


def _told_kind(layers: Sequence[Layer], path: Path) -> type[Recipe]:
    """Return the kind of the recipe in a file, which it or what it extends says by `command`."""
    command = merge(layers).get("command")
    if isinstance(command, str) and command in _COMMANDS:
        return _COMMANDS[command]
    accepted = ", ".join(f"`command: {name}`" for name in _COMMANDS)
    raise ConfigError(
        f"{_shown(path)}: `command` is {'missing' if command is None else repr(command)}",
        f"write one of {accepted}, or build on a recipe with `extends: NAME`",
    )


def _read_kind(path: Path, kind: type[Recipe], children: tuple[Path, ...] = ()) -> list[Layer]:
    """Read a recipe of a kind without its `command`; first of its layers is the name of its file, cut to a folder's."""
    layers = _read_layers(path, kind, children)
    if (other := _told_kind(layers, path)).command != kind.command:
        raise _other_kind(_shown(path), other, kind)
    name = re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("._-") or "recipe"
    return [Layer(f"the name of {path.name}", {"name": name}), *_without(layers, "command")]


def _read_layers(path: Path, kind: type[Recipe], children: tuple[Path, ...] = ()) -> list[Layer]:
    """Read a file and what it extends, which comes first; `children` are the files that extend it."""
    if path.resolve() in [child.resolve() for child in children]:
        chain = " -> ".join(_shown(p) for p in (*children, path))
        raise ConfigError(f"`extends` is circular: {chain}", "remove `extends` from one of them")
    values, below = {**_read_mapping(path)}, []
    if (base := _pop_base(values, path, "extends", kind)) is not None:
        below = _without(_read_layers(base, kind, (*children, path)), *_OWN_KEYS)
    for key, section_kind in recipe_sections(kind).items():
        if not isinstance(values.get(key), dict):
            continue
        values[key] = {**values[key]}
        base = _pop_base(values[key], path, f"{key}.extends", section_kind)
        if base is not None:  # it replaces the inherited section; the two are not merged
            section = _read_kind(base, section_kind, (*children, path))
            below = [*_without(below, key), *(Layer(layer.origin, {key: layer.values}) for layer in section)]
    return [*below, Layer(_shown(path), values)]


def _without(layers: Sequence[Layer], *keys: str) -> list[Layer]:
    """Return layers without some top-level keys."""
    return [Layer(origin, {key: values[key] for key in values if key not in keys}) for origin, values in layers]


def _pop_base(values: dict[str, Any], path: Path, key: str, kind: type[Recipe]) -> Path | None:
    """Take `extends` out of a recipe or section; return the file that it names."""
    name = values.pop("extends", None)
    if name is None or isinstance(name, str):
        return None if name is None else _find_recipe(name, kind, extended_by=path)
    raise ConfigError(
        f"{_shown(path)}: `{key}` is {name!r}; accepted: the name of a recipe, or a file beside this one", _LIST_HINT
    )


def _read_mapping(path: Path) -> Mapping[str, Any]:
    try:
        content = parse_yaml(path.read_bytes().decode())
        if isinstance(content, dict):
            return content
        kind = "empty" if content is None else f"a {type(content).__name__}"
        reason = f"the file is {kind}; a recipe is a mapping of sections"
    except OSError as error:
        reason = f"the recipe cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        reason = f"not a text file: byte {error.start} is not UTF-8"
    except yaml.YAMLError as error:
        reason = describe_yaml_error(error)
    raise ConfigError(f"{_shown(path)}: {reason}", "a recipe is a YAML file in UTF-8 with `key: value` lines")
