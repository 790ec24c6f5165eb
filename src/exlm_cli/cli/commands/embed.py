"""`exlm embed`: vectors of a file's rows from any run."""

from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import Device, JsonOption, ScoringDeviceOption, SmilesColumnOption, TextColumnOption


def embed(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `exlm pretrain` or `exlm finetune`.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="CSV or TSV with a header, or one row a line.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Vectors, as .npz or .parquet.")],
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    device: ScoringDeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Write vectors of SMILES or texts from a run's encoder.

    Each row has two vectors: the last state at [CLS], and the mean of the last states of the tokens. Of a fine-tuned
    run the seed with the best validation score is taken.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.commands.predict import input_column, print_summary
    from exlm_cli.cli.runs import given_runs
    from exlm_cli.files import expand_path

    (given,) = given_runs([run])
    path = expand_path(file)
    progress = console.open_progress()
    from exlm_cli.finetune import embed as engine

    if given.kind == "pretrain":
        from exlm_cli.train.pretrained import load_pretrained

        encoder = engine.pretrained_encoder(load_pretrained(run, device=device.value, progress=progress))
    else:
        from exlm_cli.finetune.model import load_finetuned

        encoder = engine.finetuned_encoder(load_finetuned(run, device=device.value))
    column = input_column(run, encoder.kind, smiles_column, text_column)
    print_summary(engine.embed(encoder, path, out, column=column, progress=progress), as_json=as_json)
