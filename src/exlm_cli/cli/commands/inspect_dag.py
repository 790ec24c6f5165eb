"""`exlm inspect-dag`: the DAG behind one sentence or SMILES."""

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exlm_cli.cli.options import JsonOption, ScoringDeviceOption, parse_formats
from exlm_cli.dag import FORMATS, check_sentence
from exlm_cli.errors import ConfigError
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.config.pretrain import PretrainRecipe


def inspect_dag(
    sentence: Annotated[str, typer.Argument(help="Text or SMILES in which each [MASK] hides a token.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="RUN",
            parser=expand_path,
            help="Run directory or hub:OWNER/NAME; default: the newest finished one that fits.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", parser=expand_path, help="Where files go; default: report/ of the run."),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=50, metavar="N", help="Words of each node.")] = 3,
    n_best: Annotated[int, typer.Option("--n-best", min=1, max=1000, metavar="N", help="Joint fillings.")] = 10,
    length: Annotated[
        Literal["exact", "any"],
        typer.Option("--length", help="exact: one token per [MASK]; any: also none or several."),
    ] = "exact",
    formats: Annotated[
        str, typer.Option("--format", metavar="LIST", help=f"Files to write, of {','.join(FORMATS)}; or none.")
    ] = ",".join(FORMATS),
    device: ScoringDeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show the DAG of one input and its best joint fillings.

    Words and probabilities go to the terminal, pictures and tables to files.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import choose_checkpoint

    wanted, is_smiles = parse_formats(formats, FORMATS), _is_smiles(sentence)
    if out is not None and not wanted:
        raise ConfigError(f"`--out {out}` cannot be combined with `--format none`", "leave one of them out")
    check_sentence(sentence, is_smiles=is_smiles)
    progress = console.open_progress()
    kind = "SMILES run" if is_smiles else "text run"

    def fits(recipe: "PretrainRecipe") -> bool:
        return recipe.data.kind == ("smiles" if is_smiles else "text") and recipe.masking.num_repeats == 1

    run = choose_checkpoint(
        checkpoint,
        # an MLM has guesses to show, but no DAG
        {f"{kind} of an ExLM": lambda recipe: fits(recipe) and recipe.objective == "exlm", kind: fits},
        recipe_to_make_one="quickstart-smiles" if is_smiles else "quickstart-text",
        progress=progress,
    )
    from exlm_cli.api import MANY_MASKS, load
    from exlm_cli.dag.report import write_report
    from exlm_cli.dag.text import inspection_as_dict, render_terminal

    loaded = load(run, device=device, progress=progress)
    inspection = loaded.fill(sentence, num_fillings=n_best, num_top=top, length=length)

    def show() -> None:
        if not as_json:
            console.emit_renderable(render_terminal(inspection))
        if inspection.dag.num_masks > MANY_MASKS and not {"png", "svg", "html"}.isdisjoint(wanted):
            progress.message("drawing")

    folder = out or _default_folder(Path(inspection.checkpoint), sentence)
    files = write_report(inspection, folder, wanted, show=show)
    if as_json:
        return console.emit_json({**inspection_as_dict(inspection), "files": files})
    if files:
        console.emit_text("")
        console.emit_files(files)


def _is_smiles(sentence: str) -> bool:
    """Tell SMILES from text: every character belongs to a SMILES token ([MASK] looks like a bracket atom).

    A full stop or question mark ends sentences, but no SMILES.
    """
    from exlm_cli.data.smiles import SMILES_PATTERN

    return re.fullmatch(f"(?:{SMILES_PATTERN})+(?<![.?])", sentence.strip()) is not None


def _default_folder(checkpoint: Path, sentence: str) -> Path:
    """Return a folder in the run's report/ that one sentence always gets again."""
    from exlm_cli.run_dir import run_directory

    words = re.sub(r"[^a-z0-9]+", "-", sentence.lower()).strip("-")[:24].strip("-")
    digest = hashlib.sha256(sentence.encode()).hexdigest()[:8]
    return run_directory(checkpoint) / "report" / f"dag-{words}-{digest}"
