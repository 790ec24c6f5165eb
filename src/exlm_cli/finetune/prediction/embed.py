"""Vectors of a user's rows from any checkpoint, pre-trained or fine-tuned.

Axes: R rows of the table or positions of a batch of n, D model width.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.finetune import FinetuneModelConfig
from exlm_cli.config.tasks import InputKind
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.files import folder_for_results, write_atomically
from exlm_cli.finetune.cells.model import Finetuned
from exlm_cli.finetune.cells.runner import TaskRunner, evaluating
from exlm_cli.finetune.prediction.predict import refuse_overwriting
from exlm_cli.model.heads import TaskModel, mean_state
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import PredictionSummary
from exlm_cli.tasks.rows.table import InputRows, read_input_rows
from exlm_cli.tasks.rows.task import encode_input_rows
from exlm_cli.train.pretrained import Pretrained

SUFFIXES = (".npz", ".parquet")
MAX_INPUT_CHARACTERS = 1000
"""Characters of an input in `.npz`: NumPy pads every text of an array to the longest, four bytes a character."""


@dataclass(frozen=True)
class RowEncoder:
    """An encoder and the form of its input.

    Attributes:
        columns: Column of the SMILES or text that it was trained on; empty: it has no name, or it was of pairs.
        canonical_smiles: Whether it reads RDKit's canonical SMILES.
        sequence_length: Tokens of a sequence before repetition.
        origin: Run and seed, for the notes.
        has_literal_tsv: Whether quotes in a TSV are part of its cells, as in the files of GLUE.
        reads_parents: Whether it reads the parents of molecules instead of salts.
    """

    runner: TaskRunner
    tokenizer: Tokenizer
    kind: InputKind
    columns: tuple[str, ...]
    canonical_smiles: bool
    sequence_length: int
    origin: str
    has_literal_tsv: bool = False
    reads_parents: bool = False


def pretrained_encoder(pretrained: Pretrained) -> RowEncoder:
    """Return the encoder of a pre-trained model, for input without masks."""
    recipe, tokenizer = pretrained.recipe, pretrained.tokenizer
    device = next(pretrained.model.parameters()).device
    model = TaskModel(recipe, FinetuneModelConfig(), tokenizer.vocab_size, 1)
    model.load_encoder(pretrained.model)
    data = recipe.data
    runner = TaskRunner(model.to(device).eval(), tokenizer, recipe.masking.num_repeats, recipe.train)
    return RowEncoder(
        runner,
        tokenizer,
        data.kind,
        () if data.column is None else (data.column,),
        data.has_canonical_smiles,
        data.sequence_length,
        pretrained.name,
    )


def finetuned_encoder(finetuned: Finetuned, seed: int | None = None) -> RowEncoder:
    """Return the encoder of a seed on the first split; axes of different seeds have no common meaning.

    Args:
        finetuned: The models.
        seed: One of theirs; None: the one with the best validation score.
    """
    task, best = finetuned.recipe.task, finetuned.results.best_seed
    seed = best if seed is None else seed
    return RowEncoder(
        finetuned.runners[seed],
        finetuned.tokenizer,
        finetuned.encoder_recipe.data.kind,
        task.input_columns if len(task.input_columns) == 1 else (),
        task.has_canonical_smiles,
        finetuned.sequence_length,
        f"{finetuned.run}, seed {seed}" + (", the best in validation" if seed == best else ""),
        has_literal_tsv=task.suite == "glue",
        reads_parents=task.reads_parents,
    )


@dataclass(frozen=True)
class Vectors:
    """Vectors of R rows; NaN where a row cannot be read.

    Attributes:
        cls: (R, D) float32, the last state at [CLS] after the final LayerNorm.
        mean: (R, D) float32, the mean of the last states of all tokens, [CLS], [SEP] and every copy of a repeated token
            included, as sentence-transformers has it.
        problems: R strings, why a row cannot be read; empty where it can.
        notes: On the encoder, and on rows that were cut, have tokens outside the vocabulary or a doubtful metal.
    """

    cls: NDArray[np.float32]
    mean: NDArray[np.float32]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def embed_rows(encoder: RowEncoder, rows: InputRows, progress: Progress) -> Vectors:
    """Run the encoder on the rows that it can read."""
    runner, readable = encoder.runner, rows.rows
    encoded = encode_input_rows(
        rows, encoder.tokenizer, encoder.sequence_length, canonical_smiles=encoder.canonical_smiles
    )
    width = runner.model.encoder.token_embedding.embedding_dim
    cls, mean = (np.full((len(rows.table), width), np.nan, dtype=np.float32) for _ in range(2))
    num_done = 0
    with progress.bar("embeddings", len(encoded)) as bar, evaluating(runner.model):
        for batch in runner.batches(encoded, np.arange(len(encoded))) if len(encoded) else ():
            with runner.autocast():
                hidden_nRD = runner.model.encode(batch.token_ids, batch.lengths, batch.is_padded).float()
            means_nD = mean_state(hidden_nRD, batch.lengths)
            into = readable[batch.sample_index.cpu().numpy()]
            cls[into], mean[into] = hidden_nRD[:, 0].cpu().numpy(), means_nD.cpu().numpy()
            num_done += len(into)
            bar.update(num_done)
    notes = (f"{width} numbers a vector", f"vectors of {encoder.origin}", *rows.notes, *encoded.notes)
    return Vectors(cls, mean, rows.problems, notes)


def embed(
    encoder: RowEncoder, path: Path, out: Path, *, columns: tuple[str, ...], progress: Progress
) -> PredictionSummary:
    """Write the vectors of each row of a table.

    `.npz` holds the arrays `line`, `input`, `problem`, `cls` and `mean` (see `Vectors`), which `numpy.load` reads
    without pickle; inputs are cut to `MAX_INPUT_CHARACTERS`. `.parquet` has columns of the same names; `cls` and `mean`
    are lists.

    Args:
        path: CSV, TSV, Parquet or SDF, also .gz, or .smi and .txt.
        columns: Column of the SMILES or text; empty: the one the encoder was trained on, else one with a usual name.

    Raises:
        ConfigError: `out` ends in another suffix, or is the input file.
        DataError: The table or its column cannot be read.
        CheckpointError: A file cannot be written.
    """
    if out.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"`--out {out}`: the name must end in {' or '.join(SUFFIXES)}", f"give `--out {out.stem}{SUFFIXES[0]}`"
        )
    refuse_overwriting(path, out)
    with folder_for_results(out.parent, out):
        rows = read_input_rows(
            path,
            encoder.kind,
            progress,
            columns=columns,
            usual_columns=encoder.columns,
            has_literal_tsv=encoder.has_literal_tsv,
            reads_parents=encoder.reads_parents,
        )
        vectors = embed_rows(encoder, rows, progress)
        written: dict[str, Any] = {
            "line": np.array(rows.table.lines, dtype=np.int64),
            "input": rows.inputs,
            "problem": rows.problems,
            "cls": vectors.cls,
            "mean": vectors.mean,
        }
        write_atomically(out, _file_of(written, is_parquet=out.suffix.lower() == ".parquet"))
    return PredictionSummary((out,), len(rows.table), len(rows.table) - len(rows.rows), {}, vectors.notes)


def _file_of(columns: dict[str, Any], *, is_parquet: bool) -> bytes:
    buffer = io.BytesIO()
    if is_parquet:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), buffer)
    else:
        inputs = np.array([text[:MAX_INPUT_CHARACTERS] for text in columns["input"]], dtype=np.str_)
        np.savez_compressed(buffer, **columns | {"input": inputs})
    return buffer.getvalue()
