"""Vectors of a user's rows from any checkpoint, pre-trained or fine-tuned.

Axes: R rows of the table, n of a batch, D model width.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exlm_cli.config.finetune import FinetuneModelConfig
from exlm_cli.config.tasks import InputKind
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.files import make_folder, write_atomically
from exlm_cli.finetune.model import Finetuned
from exlm_cli.finetune.trainer import TaskRunner
from exlm_cli.model.heads import TaskModel
from exlm_cli.progress import Progress
from exlm_cli.tasks.row_task import encode_input_rows
from exlm_cli.tasks.table_rows import InputRows, read_input_rows
from exlm_cli.train.pretrained import Pretrained

SUFFIXES = (".npz", ".parquet")

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Encoder:
    """An encoder and the form of its input.

    Attributes:
        column: Column of the SMILES or text that it was trained on; None: it has no name.
        canonical_smiles: Whether it reads RDKit's canonical SMILES.
        sequence_length: Tokens of a sequence before repetition.
        origin: Run and seed, for the notes.
    """

    runner: TaskRunner
    tokenizer: Tokenizer
    kind: InputKind
    column: str | None
    canonical_smiles: bool
    sequence_length: int
    origin: str


@dataclass(frozen=True)
class Embeddings:
    """Vectors of each row; NaN where a row cannot be read.

    Attributes:
        rows: The table.
        cls: (R, D) last state at [CLS], after the final LayerNorm.
        mean: (R, D) mean of the last states of the tokens between [CLS] and [SEP], all copies of repeated ones.
        notes: Remarks for the user.
    """

    rows: InputRows
    cls: Vectors
    mean: Vectors
    notes: tuple[str, ...]


def pretrained_encoder(pretrained: Pretrained) -> Encoder:
    """Return the encoder of a pre-trained model, for input without masks."""
    recipe, tokenizer = pretrained.recipe, pretrained.tokenizer
    device = next(pretrained.model.parameters()).device
    model = TaskModel(recipe, FinetuneModelConfig(), tokenizer.vocab_size, 1)
    model.load_encoder(pretrained.model.state_dict())
    data, num_repeats = recipe.data, recipe.masking.num_repeats
    longest = (data.sequence_length - 2) * num_repeats + 2
    train = recipe.train.model_copy(update={"microbatch_tokens": max(recipe.train.microbatch_tokens, longest)})
    runner = TaskRunner(model.to(device).eval(), tokenizer, num_repeats, train)
    return Encoder(runner, tokenizer, data.kind, data.column, False, data.sequence_length, str(pretrained.checkpoint))


def finetuned_encoder(finetuned: Finetuned) -> Encoder:
    """Return the encoder of the seed with the best validation score; axes of different seeds have no common meaning."""
    seed = finetuned.results.best_seed()
    origin = f"{finetuned.run}, seed {seed}, the best in validation"
    task = finetuned.recipe.task
    return Encoder(
        finetuned.runners[seed],
        finetuned.tokenizer,
        finetuned.encoder_recipe.data.kind,
        task.input_column,
        task.has_canonical_smiles,
        finetuned.sequence_length,
        origin,
    )


def embed(encoder: Encoder, path: Path, *, column: str | None = None, progress: Progress) -> Embeddings:
    """Return the vectors of a table's rows.

    Args:
        encoder: What reads the rows.
        path: CSV or TSV, also .gz and .xz, or .smi and .txt.
        column: Column of the SMILES or text; None: the one the encoder was trained on, else one with a usual name.
        progress: Shows how many rows are done.

    Raises:
        DataError: The table or its column cannot be read.
    """
    rows = read_input_rows(
        path,
        encoder.kind,
        progress,
        column=column,
        usual_column=encoder.column,
        canonical_smiles=encoder.canonical_smiles,
    )
    encoded = encode_input_rows(rows, encoder.tokenizer, encoder.sequence_length)
    runner = encoder.runner
    width = runner.model.token_embedding.embedding_dim
    cls, mean = (np.full((len(rows.table), width), np.nan, dtype=np.float32) for _ in range(2))
    runner.model.eval()
    num_done = 0
    with progress.bar("embeddings", len(encoded)) as bar, torch.no_grad():
        for batch in runner.batches(encoded, np.arange(len(encoded))) if len(encoded) else ():
            with torch.autocast(runner.device.type, runner.autocast_dtype, enabled=runner.autocast_dtype is not None):
                hidden_nRD = runner.model.encode(batch.token_ids, batch.lengths).float()
            index_R = torch.arange(hidden_nRD.shape[1], device=hidden_nRD.device)
            is_inner_nR = (index_R > 0) & (index_R < batch.lengths[:, None] - 1)
            sums_nD = (hidden_nRD * is_inner_nR[..., None]).sum(1)
            means_nD = sums_nD / is_inner_nR.sum(1, keepdim=True).clamp(min=1)
            into = rows.readable[batch.sample_index.cpu().numpy()]
            cls[into], mean[into] = hidden_nRD[:, 0].cpu().numpy(), means_nD.cpu().numpy()
            num_done += len(into)
            bar.update(num_done)
    return Embeddings(rows, cls, mean, (f"vectors of {encoder.origin}", *rows.notes, *encoded.notes))


def check_suffix(path: Path) -> None:
    """Refuse a file name that `write_embeddings` has no format for.

    Raises:
        ConfigError: It ends in something else.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"`out={path}`: accepted are names that end in {' or '.join(SUFFIXES)}")


def write_embeddings(embeddings: Embeddings, path: Path) -> None:
    """Write a row for each row of the table.

    `.npz` holds arrays of the names `line`, `input`, `problem`, `cls` and `mean`, which `numpy.load` reads without
    pickle; `.parquet` columns of these names, `cls` and `mean` being lists.

    Raises:
        CheckpointError: The file system refuses.
    """
    rows = embeddings.rows
    columns: dict[str, Any] = {
        "line": np.array(rows.table.lines, dtype=np.int64),
        "input": np.array(rows.table.columns[rows.column], dtype=np.str_),
        "problem": np.array(rows.problems, dtype=np.str_),
        "cls": embeddings.cls,
        "mean": embeddings.mean,
    }
    buffer = io.BytesIO()
    if path.suffix.lower() == ".npz":
        np.savez_compressed(buffer, **columns)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), buffer)
    make_folder(path.parent)
    write_atomically(path, buffer.getvalue())
