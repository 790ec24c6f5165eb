"""`exlm export`: a run's model as a folder that transformers loads."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption


class ExportFormat(StrEnum):
    """Format of an exported model."""

    hf = "hf"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `exlm pretrain` or `exlm finetune`.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder; new or empty.")],
    export_format: Annotated[
        ExportFormat, typer.Option("--format", help="hf: safetensors, config and tokenizer for transformers.")
    ] = ExportFormat.hf,
    as_json: JsonOption = False,
) -> None:
    """Export a run's model for transformers, without remote code.

    A fresh process loads the folder with transformers and compares tokens and logits with those of the run before the
    folder appears. Of a fine-tuned run the seed with the best validation score is taken. Inputs with [MASK] work for
    an MLM; an ExLM exports as the encoder of inputs without masks.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import given_runs
    from exlm_cli.export.folder import check_before_export, export_folder

    (given,) = given_runs([run])
    check_before_export(out)
    progress = console.open_progress()
    from exlm_cli.export.source import finetuned_source, pretrained_source

    if given.kind == "pretrain":
        from exlm_cli.train.pretrained import load_pretrained

        source = pretrained_source(load_pretrained(run, device="cpu", progress=progress))
    else:
        from exlm_cli.finetune.model import load_finetuned

        source = finetuned_source(load_finetuned(run, device="cpu"))
    exported = export_folder(source, out, progress)
    comparison = exported.comparison
    result = {
        "format": export_format.value,
        "class": exported.class_name,
        "sequences_compared": comparison.num_sequences,
        "largest_difference": comparison.difference,
        "largest_output": comparison.largest,
    }
    if as_json:
        return console.emit_json({**result, "files": exported.files})
    console.emit_pairs(result)
    console.emit_files(exported.files)
