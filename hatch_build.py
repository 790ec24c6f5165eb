"""Build hook of the wheel: adds host kernels for two levels of x86-64 where a compiler is present.

Without one the wheel is a pure one: the kernels are then compiled where they are used, as in a checkout.
"""

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernels(BuildHookInterface):
    """Compiles with the code that the package itself uses at run time."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries and the platform tag; an editable installation compiles for its own processor instead."""
        if version == "editable" or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return
        build = _build_module(Path(self.root) / "src")
        folder = Path(self.root) / "build" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            libraries = build.build_prebuilt(folder)
        except build.BuildError as error:
            self.app.display_warning(f"a wheel without compiled kernels: {error}")
            return
        for library in libraries:
            build_data["force_include"][str(library)] = f"exlm_cli/cuda_ext/prebuilt/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"


def _build_module(src: Path) -> ModuleType:
    """Return `exlm_cli.ops.alignment.build` without its package, which imports torch."""
    sys.path.insert(0, str(src))
    spec = importlib.util.spec_from_file_location("kernel_build", src / "exlm_cli/ops/alignment/build.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
