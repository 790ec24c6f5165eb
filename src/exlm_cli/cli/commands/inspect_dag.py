"""`exlm inspect-dag`: the DAG behind one sentence or SMILES."""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from exlm_cli.cli.options import (
    CheckpointOption,
    JsonOption,
    KindOption,
    ScoringDeviceOption,
    parse_formats,
    refuse_together,
)
from exlm_cli.dag import FORMATS
from exlm_cli.paths import expand_path

_ALL_FORMATS = ",".join(FORMATS)

SentenceArgument = Annotated[str, typer.Argument(help="Text or SMILES in which each [MASK] hides a token.")]
FolderOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", parser=expand_path, help="Where files go; default: report/ of the run."),
]
TopOption = Annotated[int, typer.Option("--top", min=1, max=50, metavar="N", help="Words of each node.")]
NBestOption = Annotated[int, typer.Option("--n-best", min=1, max=1000, metavar="N", help="Joint fillings.")]
LengthOption = Annotated[
    Literal["exact", "any"],
    typer.Option("--length", help="exact: one token per [MASK]; any: also none or several, not of a chain."),
]
FormatsOption = Annotated[
    str, typer.Option("--format", metavar="LIST", help=f"Files to write, of {_ALL_FORMATS}; or none.")
]


def inspect_dag(
    sentence: SentenceArgument,
    checkpoint: CheckpointOption = None,
    kind: KindOption = None,
    out: FolderOption = None,
    top: TopOption = 3,
    n_best: NBestOption = 10,
    length: LengthOption = "exact",
    formats: FormatsOption = _ALL_FORMATS,
    device: ScoringDeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show the DAG of one input and its best joint fillings.

    An input without blanks that has nothing but tokens of SMILES is a SMILES, any other is text; [MASK]s alone and
    words like `so[MASK]`, whose characters are aromatic atoms, need `--kind`. Words and probabilities go to the
    terminal, pictures and tables to files.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.masked import choose_run, require_kind, require_own_kind

    wanted = parse_formats(formats, FORMATS)
    if not wanted:
        refuse_together("--format none", {"--out": out}, "leave one of them out")
    input_kind = require_kind(sentence, checkpoint, kind)
    progress = console.open_progress()
    run = choose_run(checkpoint, input_kind, progress)
    from exlm_cli.api.run import MANY_MASKS, load
    from exlm_cli.dag.report import write_report
    from exlm_cli.dag.text import inspection_as_dict, render_terminal
    from exlm_cli.report.learned import warn_of_unlearned

    loaded = load(run, device=device, progress=progress)
    require_own_kind(kind, loaded.encoder.kind, checkpoint)
    inspection = loaded.fill(sentence, num_fillings=n_best, num_top=top, length=length)
    if warning := warn_of_unlearned(Path(inspection.checkpoint), loaded.encoder.kind):
        progress.message(f"note: {warning}")

    if inspection.dag.num_masks > MANY_MASKS and not {"png", "svg", "html"}.isdisjoint(wanted):
        progress.message("drawing")
    files = write_report(inspection, out or _default_folder(run, sentence), wanted)
    if as_json:
        return console.emit_json({**inspection_as_dict(inspection), "files": files})
    console.emit_renderable(render_terminal(inspection))
    if files:
        console.emit_text("")
        console.emit_files(files)


def _default_folder(run: Path, sentence: str) -> Path:
    """Return a folder among the reports on a run or checkpoint that one sentence always gets again."""
    from exlm_cli.bundled_models import report_folder

    name = re.sub(r"[^a-z0-9]+", "-", sentence.lower()).strip("-")[:24].strip("-")
    digest = hashlib.sha256(sentence.encode()).hexdigest()[:8]
    return report_folder(run) / f"dag-{name}-{digest}"
