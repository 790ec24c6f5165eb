"""The list of source files in CONTRIBUTING.md and its tree are complete and true.

`python tests/test_file_list.py` writes the list anew from the first lines of the docstrings.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "exlm_cli"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- files: begin -->\n", "<!-- files: end -->"


def phrases() -> dict[str, str]:
    """Return the first docstring line, without its period, of every source file that is not empty."""
    lines = {}
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent.as_posix(), path.name)):
        text = path.read_text(encoding="utf-8")
        if text.strip():
            lines[path.relative_to(PACKAGE).as_posix()] = first_line(ast.get_docstring(ast.parse(text)))
    return lines


def first_line(docstring: str | None) -> str:
    """Return the first line of a docstring without its period; empty where there is none."""
    return (docstring or "").partition("\n")[0].removesuffix(".")


def listed() -> list[tuple[str, str]]:
    """Return the files and phrases of CONTRIBUTING.md, in order."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    return re.findall(r"^- `([\w/]+\.py)`: (.+)$", text.partition(BEGIN)[2].partition(END)[0], re.MULTILINE)


def tree() -> str:
    """Return the tree of CONTRIBUTING.md, the first block of text that names `src/`."""
    blocks = re.findall(r"^```text\n(.*?)^```", CONTRIBUTING.read_text(encoding="utf-8"), re.DOTALL | re.M)
    return next(block for block in blocks if "src/exlm_cli/" in block)


def test_contributing_lists_every_source_file_once_with_the_first_line_of_its_docstring():
    assert [name for name, _ in listed()] == list(phrases()), "run `python tests/test_file_list.py`"
    assert dict(listed()) == phrases(), "run `python tests/test_file_list.py`"


def test_the_tree_names_every_folder_of_the_package():
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} - {"."}
    assert not [folder for folder in sorted(folders) if f"{folder}/" not in tree()]


def test_every_path_of_the_tree_exists():
    folder = ROOT
    num_paths = 0
    for line in tree().splitlines():
        names = re.findall(r"[\w./]+(?:\.py|/)(?=[ ,]|$)", line)
        if not line.startswith(" "):
            folder = ROOT / names[0] if names[0].endswith("/") else ROOT
            assert (ROOT / names[0]).exists(), names[0]
            names = names[1:]
        for name in names:
            if name.endswith(".py"):
                assert (folder / name).is_file(), f"{folder / name}"
        num_paths += 1 + len(names)
    assert num_paths > 30


def main() -> None:
    before, begin, rest = CONTRIBUTING.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{CONTRIBUTING} has no list between {BEGIN.strip()} and {END}"
    lines = "".join(f"- `{name}`: {phrase}\n" for name, phrase in phrases().items())
    CONTRIBUTING.write_text(before + begin + lines + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
