"""`exlm export` and `exlm push`: a run's model as a folder for others, or on the Hugging Face Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exlm_cli.cli.options import JsonOption, RunArgument
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.cli.runs import GivenRun
    from exlm_cli.export.source import Source
    from exlm_cli.progress import Progress


LicenceOption = Annotated[
    str | None, typer.Option("--license", metavar="ID", help="Licence that the model card names, like apache-2.0.")
]


def export(
    run: RunArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", parser=expand_path, help="The folder; new or empty.")
    ],
    export_format: Annotated[
        Literal["hf", "onnx"],
        typer.Option("--format", help="hf: weights, config and tokenizer for transformers; onnx: for ONNX Runtime."),
    ] = "hf",
    licence: LicenceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export a run's model for transformers or ONNX Runtime.

    transformers and sentence-transformers load the folder with their own classes. Before it appears, its tokens
    and logits are compared with those of the run. A fine-tuned run exports one seed, the one with the best
    validation score; `exlm predict` averages the seeds and calibrates. An exported chain fills each mask on
    its own. Of an ExLM with any other `model.alignment`, only the encoder is exported.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import given_runs

    progress = console.open_progress()
    (given,) = given_runs([run], progress)  # before torch is loaded
    from exlm_cli.export.folder import export_folder

    source = _source_of(given, progress)
    exported = export_folder(source, out, progress, form=export_format, licence=licence)
    comparison = exported.comparison
    result = {
        "format": export_format,
        "loaded_with": exported.loaded_with,
        **({} if source.seed is None else {"seed": source.seed}),
        "sequences_compared": comparison.num_sequences,
        "largest_difference": comparison.difference,
        "largest_output": comparison.largest,
    }
    if source.seed_note is not None:
        progress.message(f"note: {source.seed_note}")
    if as_json:
        return console.emit_json({**result, "files": exported.files})
    console.emit_pairs(result)
    console.emit_files(exported.files)


def push(
    run: RunArgument,
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hub; created if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    licence: LicenceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upload a run to the Hugging Face Hub.

    The repository holds what `exlm export` writes (after the same check) and the run without its optimizer. Every
    command then reads the run as `hub:OWNER/NAME`. The token is that of `hf auth login` or HF_TOKEN.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import given_runs

    progress = console.open_progress()
    (given,) = given_runs([run], progress)  # before torch is loaded
    from exlm_cli.export.hub import check_before_push, push_run

    check_before_push(repo, licence)
    source = _source_of(given, progress)
    pushed = push_run(source, repo, progress, is_private=private, licence=licence)
    if source.seed_note is not None:
        progress.message(f"note: {source.seed_note}")
    result = {"url": pushed.url, "commit": pushed.commit, "read_it_as": f"hub:{repo}@{pushed.commit}"}
    return console.emit_json(result) if as_json else console.emit_pairs(result)


def _source_of(given: "GivenRun", progress: "Progress") -> "Source":
    """Read the model of a run; for a fine-tuned run, the seed with the best validation score."""
    from exlm_cli.export.source import finetuned_source, pretrained_source

    if given.kind == "pretrain":
        from exlm_cli.train.pretrained import load_pretrained

        return pretrained_source(load_pretrained(given.path, device="cpu", progress=progress))
    from exlm_cli.finetune.cells.model import load_finetuned

    return finetuned_source(load_finetuned(given.path, device="cpu"))
