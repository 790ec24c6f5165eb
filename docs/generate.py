"""Pages of the site that come from the code, and links of the documents that leave the folder. Hooks of MkDocs.

`commands.md` is read from the command line and `recipe_keys.md` from the models of the recipes. `kernels.md` and
`recipes.md` are documents that lie beside the code. Notebooks are shown with the outputs that they store.
"""

import html
import json
import posixpath
import re
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from exlm_cli.cli.app import app
from exlm_cli.config.load import KINDS

ROOT = Path(__file__).resolve().parents[1]
URL = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
COPIED = {"kernels.md": "cuda_ext/README.md", "recipes.md": "recipes/README.md"} | {
    f"notebooks/{path.stem}.md": f"docs/notebooks/{path.name}" for path in (ROOT / "docs/notebooks").glob("*.ipynb")
}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_config(config: MkDocsConfig) -> None:
    """Replace a folder in the navigation by its pages, its README first."""
    for entry in config.nav or []:
        for title, target in entry.items():
            if isinstance(target, str) and (ROOT / "docs" / target).is_dir():
                names = sorted(path.name for path in (ROOT / "docs" / target).glob("*.md"))
                entry[title] = [f"{target}/{name}" for name in sorted(names, key=lambda name: name != "README.md")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in the folder."""
    pages = {"commands.md": "".join(commands()), "recipe_keys.md": "".join(recipe_keys())}
    for page, source in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        pages[page] = "\n".join(notebook(json.loads(text))) if source.endswith(".ipynb") else text
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to files of the repository into links to pages, or to the repository where they are none."""
    source = COPIED.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {path: name for name, path in COPIED.items()}

    def moved(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in pages or path.startswith("docs/"):
            inside = pages.get(path, path.removeprefix("docs/"))
            return f"{before}{posixpath.relpath(inside, posixpath.dirname(page.file.src_uri) or '.')}{after}"
        if not (ROOT / path).exists():
            raise SystemExit(f"{source} links to {target}, which does not exist")
        return f"{before}{URL}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{after}"

    return LINK.sub(moved, markdown)


def commands() -> Iterator[str]:
    """Yield every command with its help, arguments and options."""
    yield "# Commands\n\nEvery command with all its options, as `exlm COMMAND --help` prints them.\n"
    group = typer.main.get_command(app)
    parent = group.context_class(group, info_name="exlm")
    for name, command in group.commands.items():
        context = command.context_class(command, info_name=name, parent=parent)
        usage = command.get_usage(context).removeprefix("Usage: ")
        yield f"\n## exlm {name}\n\n{command.help}\n\n```text\n{usage}\n```\n\n| option | meaning |\n|---|---|\n"
        for parameter in command.get_params(context):
            if record := parameter.get_help_record(context):
                yield f"| `{record[0]}` | {cell(record[1])} |\n"


def recipe_keys() -> Iterator[str]:
    """Yield every key of every kind of recipe: its type or values, its default and its meaning."""
    yield "# Recipe keys\n\nA recipe is a YAML file that says its `command: pretrain`, `sweep` or `finetune`, "
    yield "or extends one; `--set section.key=value` changes one value.\n"
    yield "`exlm recipes NAME` prints a recipe with all its keys, `--describe` also their meaning.\n"
    for kind in KINDS:
        yield f"\n## Recipes of exlm {kind.command}\n"
        yield from section(kind, "")


def notebook(content: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a notebook with what they show."""
    for each in content["cells"]:
        source = "".join(each["source"])
        yield source if each["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in each.get("outputs", ()):
            data = output.get("data", {})
            if svg := "".join(data.get("image/svg+xml", ())):
                yield f'<img alt="drawing" src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}">'
            else:
                yield f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"
        yield ""


def section(schema: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield a table of the keys in a section, then the sections in it; those of a union under the tag of each."""
    inner: list[tuple[str, Any]] = []
    yield "\n| key | values | default | meaning |\n|---|---|---|---|\n"
    for name, field in schema.model_fields.items():
        models = [each for each in alternatives(field.annotation) if is_section(each)]
        if models:
            inner += [(f"{prefix}{name}.", model) for model in models]
        else:
            yield f"| `{name}` | {values(field)} | {default(field)} | {cell(field.description or '')} |\n"
    for path, model in inner:
        if not issubclass(model, KINDS):
            yield f"\n**`{path[:-1]}`**: {cell((model.__doc__ or '').partition(chr(10))[0])}\n"
            yield from section(model, path)
        else:
            yield f"\n**`{path[:-1]}`**: the keys of a recipe of `exlm {model.command}`.\n"


def alternatives(annotation: Any) -> list[Any]:
    """Return the types of a union, or the type itself."""
    if get_origin(annotation) in (None, Literal, tuple, dict, list):
        return [annotation]
    return [each for part in get_args(annotation) for each in alternatives(part)]


def is_section(annotation: Any) -> bool:
    """Return whether a type is a model with keys."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def values(field: FieldInfo) -> str:
    """Return the accepted values: a type, its bounds, or the words of a choice."""
    words = []
    for kind in alternatives(field.annotation):
        if get_origin(kind) is Literal:
            words += [f"`{each}`" for each in get_args(kind)]
        elif isinstance(kind, type) or get_origin(kind):
            words.append("none" if kind is type(None) else re.sub(r"\[.*", "", getattr(kind, "__name__", str(kind))))
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[key]} {getattr(each, key):,}" for each in field.metadata for key in signs if hasattr(each, key)]
    plain = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "tuple": "list"}
    text = " or ".join(plain.get(word, word) for word in dict.fromkeys(words))
    return f"{text}, {', '.join(bounds)}" if bounds else text


def default(field: FieldInfo) -> str:
    """Return the default as YAML shows it."""
    value = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    if value is PydanticUndefined:
        return "*required*"
    if isinstance(value, BaseModel):
        return "its own defaults"
    return f"`{json.dumps(value)}`".replace("null", "none")


def cell(text: str) -> str:
    """Return a text for a cell of a table; what is not code shows its signs as they are."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [html.escape(part, quote=False).replace("|", "&#124;") for part in parts[::2]]
    return "`".join(parts)
