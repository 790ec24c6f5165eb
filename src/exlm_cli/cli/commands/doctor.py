"""`exlm doctor`: compilers, GPUs and alignment kernels of this machine."""

from dataclasses import asdict
from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption


def doctor(
    build: Annotated[bool, typer.Option("--build", help="Compile the kernels now, not at their first use.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show compilers, GPUs and alignment kernels; build them."""
    from exlm_cli.cli import console
    from exlm_cli.ops.alignment import diagnosis

    if build:
        diagnosis.build_kernels(console.open_progress())
    found = diagnosis.diagnose()
    if as_json:
        return console.emit_json(asdict(found))
    console.emit_pairs(
        {
            "torch": found.torch,
            "processor": found.processor,
            "GPU": ", ".join(found.gpus) or "none",
            "C++ compiler": found.compiler or "none",
            "nvcc": found.nvcc or "none",
            "cache": found.cache,
            "CPU kernels": found.cpu.path or found.cpu.note,
            "CPU backend": found.cpu.backend,
            "CUDA kernels": "; ".join(filter(None, (found.cuda.path, found.cuda.note))),
            "CUDA backend": found.cuda.backend,
        }
    )
