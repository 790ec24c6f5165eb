"""Imports run one way, lazy ones included, and no import of a light layer leads to torch. Read with `ast`, then run."""

import ast
import contextlib
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import exlm_cli
from tests.test_dependencies import distribution, import_statements, imported_modules, normal

PACKAGE = Path(exlm_cli.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# an import may only point to a smaller number; files of one layer may import each other
LAYERS = {
    "errors": 0, "progress": 0, "format": 0, "processes": 0, "paths": 1, "files": 1, "run_dir": 1, "bundled_models": 1,
    "config": 2, "cost": 3, "data": 4, "ops": 5, "model": 6, "distributed": 7, "train": 8,
    "tasks": 9, "finetune": 10, "experiments": 11, "report": 12, "dag": 13, "fill": 14, "export": 14, "api": 15,
    "cli": 16, "__main__": 17,
}  # fmt: skip

LIGHT = (
    "errors.py", "progress.py", "format.py", "processes.py", "paths.py", "files.py", "run_dir.py", "bundled_models.py",
    "distributed/launch.py", "config/", "cost/", "report/", "data/",
)  # fmt: skip
WITH_TORCH = ("cost/meter.py", "data/batch.py", "data/masking.py", "data/sampler.py")
HEAVY = ("torch", "datasets", "rdkit", "matplotlib", "tokenizers", "numpy", "pandas", "pyarrow")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the dotted modules that a file imports anywhere, `from exlm_cli import x` as `exlm_cli.x`."""
    nodes = import_statements(path)
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), f"{path}: relative import"
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert PACKAGE.name not in whole, f"{path}: imports the package itself"
    return set(imported_modules(nodes)) - {PACKAGE.name}


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    return ".".join(("exlm_cli", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def test_imports_point_to_lower_layers_only():
    """But for the public names of the package, which nothing inside it imports."""

    def layer(name: str) -> int:
        return LAYERS[name.removesuffix(".py")]

    upward = [
        f"{relative(path)} imports {module}"
        for path in FILES
        for module in imports_of(path)
        if path != PACKAGE / "__init__.py" and module.startswith("exlm_cli.")
        and layer(module.split(".")[1]) > layer(relative(path).partition("/")[0])
    ]  # fmt: skip
    assert upward == []


def imported_at_any_time(module: str) -> set[str]:
    """Return the modules of the package that one imports, in functions too; a package only where it is itself meant."""
    found: set[str] = set()
    for node in import_statements(MODULES[module]):
        named = [name for name in imported_modules([node]) if name in MODULES]
        found.update(named[1:] or named)
    return found


def test_no_module_leads_back_to_itself():
    """`graphlib` raises an error that names a circle where there is one."""
    imported = {module: imported_at_any_time(module) for module in MODULES}
    assert len([*TopologicalSorter(imported).static_order()]) == len(MODULES)


LIGHT_FILES = [path for path in FILES if relative(path).startswith(LIGHT) and relative(path) not in WITH_TORCH]


def test_light_layers_import_no_torch_nor_what_imports_it():
    """In functions they name none; at once, and through other packages, none is loaded."""
    assert not [path for path in LIGHT_FILES if "torch" in {name.partition(".")[0] for name in imports_of(path)}]
    script = (
        "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print('torch' in sys.modules)"
    )
    names = [module_of(path) for path in LIGHT_FILES]
    assert {"exlm_cli.config.load", "exlm_cli.report.finetuning.page", "exlm_cli.report.finetuning.figures"} <= {*names}
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_help_loads_nothing_heavy_and_a_dry_run_no_torch():
    script = f"""if True:
        import sys
        from exlm_cli.cli.app import main
        for words in (["--help"], ["--version"], *([name, "--help"] for name in ("pretrain", "inspect-dag", "fill"))):
            assert main(words) == 0
            assert not {{*sys.modules}} & {{*{HEAVY}}}, words
        assert main(["pretrain", "--recipe", "text-base", "--dry-run"]) == 0
        assert "torch" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\ncommand: pretrain\n" in done.stdout


OP_ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
sys.modules.update(dict.fromkeys(sys.argv[2:]))  # None: ModuleNotFoundError
import torch
from exlm_cli import best_alignment, states_alignment_nll
E = torch.full((1, 4, 4), -torch.inf, dtype=torch.float64)
E[0, 0, 1:3], E[0, 1, 2:4], E[0, 2, 3] = -torch.tensor(2.0).log(), -torch.tensor(2.0).log(), 0.0
P = torch.full((1, 1, 4), 0.25, dtype=torch.float64).log().requires_grad_()
for backend in ("reference", "native"):
    nll = states_alignment_nll(P, E, torch.tensor([1]), torch.tensor([4]), backend=backend)
    torch.testing.assert_close(nll.exp(), torch.tensor([16 / 3], dtype=torch.float64))
    posterior = -torch.autograd.grad(nll.sum(), P)[0][0, 0, 1:3]
    torch.testing.assert_close(posterior, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
assert best_alignment(P, E, torch.tensor([1]), torch.tensor([4])).tolist() == [[2]]
"""


def packages_that_torch_does_not_need() -> set[str]:
    """Return the import names of all installed packages but torch and what it requires, directly or not."""
    names, todo = set(), ["torch", "numpy"]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            with contextlib.suppress(PackageNotFoundError):
                todo += [distribution(each) for each in requires(name) or [] if "extra ==" not in each]
    return {module for module, owners in packages_distributions().items() if not names & {*map(normal, owners)}}


def test_the_op_needs_torch_and_nothing_else():
    """One target and two inner nodes: 0-1-3 has 1/2 * 1/4 * 1/2 and 0-2-3 has 1/2 * 1/4 * 1, together 3/16."""
    blocked = packages_that_torch_does_not_need() - {PACKAGE.name}
    assert {"pydantic", "jaxtyping", "yaml", "typer"} <= blocked
    words = [sys.executable, "-I", "-c", OP_ALONE, str(PACKAGE.parent), *sorted(blocked)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
