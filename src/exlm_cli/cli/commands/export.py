"""`exlm export`: a run's model as a folder that transformers loads."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption


class ExportFormat(StrEnum):
    """Format of an exported model."""

    hf = "hf"
    onnx = "onnx"


LicenceOption = Annotated[
    str | None, typer.Option("--license", metavar="ID", help="Licence that the model card names, like apache-2.0.")
]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `exlm pretrain` or `exlm finetune`.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder; new or empty.")],
    export_format: Annotated[
        ExportFormat,
        typer.Option("--format", help="hf: weights, config and tokenizer for transformers; onnx: for ONNX Runtime."),
    ] = ExportFormat.hf,
    licence: LicenceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export a run's model for transformers or ONNX Runtime.

    Before the folder appears it is loaded, and tokens and logits are compared with those of the run. Of a fine-tuned
    run the seed with the best validation score is taken. In transformers, only inputs of an ExLM with [MASK]s need the
    code in the folder (`trust_remote_code=True`); an ONNX model of an ExLM reads inputs without [MASK]s.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import given_runs
    from exlm_cli.export.folder import check_before_export, export_folder

    (given,) = given_runs([run])
    check_before_export(out, export_format.value)
    progress = console.open_progress()
    from exlm_cli.export.source import finetuned_source, pretrained_source

    if given.kind == "pretrain":
        from exlm_cli.train.pretrained import load_pretrained

        source = pretrained_source(load_pretrained(run, device="cpu", progress=progress))
    else:
        from exlm_cli.finetune.model import load_finetuned

        source = finetuned_source(load_finetuned(run, device="cpu"))
    exported = export_folder(source, out, progress, form=export_format.value, licence=licence)
    comparison = exported.comparison
    result = {
        "format": export_format.value,
        "loaded_with": exported.loaded_with,
        "sequences_compared": comparison.num_sequences,
        "largest_difference": comparison.difference,
        "largest_output": comparison.largest,
    }
    if as_json:
        return console.emit_json({**result, "files": exported.files})
    console.emit_pairs({**result, "loaded_with": ", ".join(exported.loaded_with)})
    console.emit_files(exported.files)
