"""Numbers of a run: what each seed predicts, and the rows of its splits with their truth. No torch.

`predictions.parquet`, in the folder of a cell or of a baseline's seed, has `part`, `row` and `predicted:<name>` of each
output. `rows.parquet`, in the folder of the run, has `split_seed`, `part`, `row`, `true:<name>` (of classes
`true:class`) and, of what is scored, the place in the file, what the model reads, and of molecules the similarity to
the training molecules. Of further splits it has what is scored alone. Of spans, `logits-valid.npz` of a cell has the
logits.

Axes: N rows of a part, C outputs.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from exlm_cli.data import BoolArray, IntArray
from exlm_cli.errors import CheckpointError
from exlm_cli.files import read_whole, write_atomically
from exlm_cli.finetune.baselines.arrays import MAX_UNPACKING, read_arrays, write_arrays
from exlm_cli.finetune.results import RunResults, baseline_folder, best_cell_folder, how_to_redo
from exlm_cli.finetune.scores import Predictor
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import EncodedRows, FloatArray, Loss, Split

if TYPE_CHECKING:
    from pandas import DataFrame

PREDICTIONS_FILE = "predictions.parquet"
LOGITS_FILE = "logits-valid.npz"
"""File of a cell with the logits of spans, (sum of L, 2) float32, of whose mean over seeds the score is."""
ROWS_FILE = "rows.parquet"
ROWS_HINT = "fine-tune again"
_PREDICTED, _TRUE = "predicted:", "true:"


def write_predictions(
    folder: Path, names: Sequence[str], predicted: Mapping[Split, FloatArray], rows: Mapping[Split, IntArray]
) -> None:
    """Write the (N, C) probabilities or values of the parts of the rows.

    Args:
        names: C outputs.
        rows: Rows of the input in each part, counted from 0.

    Raises:
        CheckpointError: The file cannot be written.
    """
    together_NC = np.concatenate(list(predicted.values()))
    columns = {f"{_PREDICTED}{name}": column for name, column in zip(names, together_NC.T, strict=True)}
    _write(folder / PREDICTIONS_FILE, _keys({part: rows[part] for part in predicted}) | columns)


def read_predictions(
    folder: Path, names: Sequence[str], rows: Mapping[Split, IntArray], hint: str
) -> dict[Split, FloatArray]:
    """Return what `write_predictions` wrote, by part.

    Args:
        rows: Rows of the input in each part that is read.
        hint: How to get the file back.

    Raises:
        CheckpointError: The file is missing or altered, or its rows are others.
    """
    path = folder / PREDICTIONS_FILE
    table = _read(path, [f"{_PREDICTED}{name}" for name in names], hint)
    found = {}
    for part, of_part in rows.items():
        chosen = table[table.part == part]
        if not np.array_equal(chosen.row.to_numpy(), of_part):
            raise CheckpointError(f"{path}: its rows are not those of the split", hint)
        found[part] = chosen[[f"{_PREDICTED}{name}" for name in names]].to_numpy(dtype=np.float64)
    return found


def read_seed_predictions(
    run: Path, results: RunResults, rows: Mapping[Split, IntArray], *, baseline: str | None = None
) -> dict[Split, FloatArray]:
    """Return the (K, N, C) predictions of the seeds for parts of the rows of the first split of `results`.

    Args:
        rows: Rows of the input in each part.
        baseline: Read what this baseline predicted; None: the model at its best grid point.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    by_seed = []
    for seed in results.seeds:
        if baseline is None:
            place = best_cell_folder(run, results, seed)
            hint = how_to_redo(place)
        else:
            place = baseline_folder(run, baseline, results.split_seeds[0], seed)
            hint = f"delete {place} and continue with `{resume_command('finetune', run)}`"
        by_seed.append(read_predictions(place, results.output_names, rows, hint))
    return {part: np.stack([of_seed[part] for of_seed in by_seed]) for part in rows}


def read_predictor(
    run: Path, results: RunResults, rows: Mapping[Split, IntArray], predictor: Predictor
) -> dict[Split, FloatArray]:
    """Return the (K, N, C) predictions of what predicts; arguments and errors as of `read_seed_predictions`."""
    found = [read_seed_predictions(run, results, rows)] if predictor in ("model", "both") else []
    if predictor != "model":
        assert results.predictors is not None, "only a run with baselines has other predictors"
        found.append(read_seed_predictions(run, results, rows, baseline=results.predictors.baselines[0]))
    return {part: np.mean([one[part] for one in found], axis=0) for part in rows}


def write_logits(cell: Path, outputs: Sequence[FloatArray]) -> None:
    """Write the (L, 2) logits of the validation examples of spans.

    Raises:
        CheckpointError: A file cannot be written.
    """
    write_arrays(cell / LOGITS_FILE, {"logits": np.concatenate(outputs).astype(np.float32)}, is_packed=False)


def read_logits(cell: Path, lengths: Sequence[int]) -> list[FloatArray]:
    """Return what `write_logits` wrote, for N examples of L tokens each.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    path, hint = cell / LOGITS_FILE, how_to_redo(cell)
    logits = read_arrays(path, hint, {"logits": ("float32", 2)}, "logits")["logits"]
    if logits.shape != (sum(lengths), 2):
        raise CheckpointError(f"{path}: not the logits of these {len(lengths):,} windows", hint)
    return np.split(logits.astype(np.float64), np.cumsum(lengths)[:-1])


@dataclass(frozen=True)
class PartRows:
    """Rows of a part of a split.

    Attributes:
        rows: (N,) row of the input, counted from 0.
        targets: (N, C), NaN where missing; (N, 1) class index for `classes`.
        inputs: Text or SMILES of each row, as the model reads it; two texts have a bar between. None where not known.
        places: Place of each row in its file, like `line 7`; none where it is not known.
        similarity: (N,) largest Tanimoto similarity to a training molecule; None of texts and of training rows.
    """

    rows: IntArray
    targets: FloatArray
    inputs: Sequence[str] = ()
    places: Sequence[str] = ()
    similarity: FloatArray | None = None

    @property
    def distance(self) -> FloatArray:
        """(N,) distance from the training molecules, 1 less the similarity; NaN where that is not known."""
        return np.full(len(self.targets), np.nan) if self.similarity is None else 1 - self.similarity

    def only(self, is_chosen_N: BoolArray) -> Self:
        """Return some of the rows."""
        return replace(
            self,
            rows=self.rows[is_chosen_N],
            targets=self.targets[is_chosen_N],
            inputs=list(compress(self.inputs, is_chosen_N)),
            places=list(compress(self.places, is_chosen_N)),
            similarity=None if self.similarity is None else self.similarity[is_chosen_N],
        )


def join_rows(parts: Sequence[PartRows]) -> PartRows:
    """Return the rows of the same part of several splits; all of them or none have inputs, places and similarities."""
    near = [part.similarity for part in parts if part.similarity is not None]
    return PartRows(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.targets for part in parts]),
        [text for part in parts for text in part.inputs],
        [text for part in parts for text in part.places],
        np.concatenate(near) if len(near) == len(parts) else None,
    )


Splits = Mapping[int, Mapping[Split, PartRows]]
"""Rows of each part by `task.split_seed`."""


def write_rows(run: Path, loss: Loss, names: Sequence[str], splits: Splits) -> None:
    """Write `rows.parquet`.

    Raises:
        CheckpointError: The file cannot be written.
    """
    named = [(seed, name, part) for seed, parts in splits.items() for name, part in parts.items()]
    every = [part for *_, part in named]
    targets_NC = np.concatenate([part.targets for part in every])
    columns: dict[str, Any] = {
        "split_seed": np.repeat([seed for seed, *_ in named], [len(part.rows) for part in every]),
        "part": [name for _, name, part in named for _ in part.rows],
        "row": np.concatenate([part.rows for part in every]),
    }
    columns |= dict(zip(_target_columns(loss, names), targets_NC.T, strict=True))
    for name in ("inputs", "places"):
        cells = [getattr(part, name) or [""] * len(part.rows) for part in every]
        columns[name] = [cell.encode(errors="backslashreplace").decode() for of_part in cells for cell in of_part]
    near = [np.full(len(p.rows), np.nan) if p.similarity is None else p.similarity for p in every]
    _write(run / ROWS_FILE, columns | {"similarity": np.concatenate(near)})


def read_rows(run: Path, loss: Loss, names: Sequence[str]) -> dict[int, dict[Split, PartRows]]:
    """Return what `write_rows` wrote.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    targets = _target_columns(loss, names)
    texts, keys = ("inputs", "places"), ("split_seed", "row")
    table = _read(run / ROWS_FILE, [*targets, "similarity"], ROWS_HINT, texts=texts, keys=keys)
    found: dict[int, dict[Any, PartRows]] = {}
    for (seed, part), rows in table.groupby(["split_seed", "part"], sort=False):
        of_rows = {name: tuple(rows[name]) if rows[name].any() else () for name in texts}
        near = rows.similarity.to_numpy()
        found.setdefault(seed, {})[part] = PartRows(
            rows.row.to_numpy(),
            rows[targets].to_numpy(dtype=np.float64),
            similarity=None if np.isnan(near).all() else near,
            **of_rows,
        )
    return found


def describe_part(rows: IntArray, encoded: EncodedRows, similarity_N: FloatArray | None) -> PartRows:
    """Return encoded rows as `rows.parquet` keeps them; what the task does not know of them is left out."""
    texts = getattr(encoded, "texts", ())
    return PartRows(
        rows, encoded.targets, [" | ".join(of_row) for of_row in texts], getattr(encoded, "places", ()), similarity_N
    )


def _target_columns(loss: Loss, names: Sequence[str]) -> list[str]:
    return [f"{_TRUE}class"] if loss == "classes" else [f"{_TRUE}{name}" for name in names]


def _keys(rows: Mapping[Split, IntArray]) -> dict[str, Any]:
    parts = [part for part, of_part in rows.items() for _ in range(len(of_part))]
    return {"part": parts, "row": np.concatenate(list(rows.values()))}


def _write(path: Path, columns: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(dict(columns)), buffer, use_dictionary=False)
    write_atomically(path, buffer.getvalue())


def _read(
    path: Path, numbers: Sequence[str], hint: str, texts: Sequence[str] = (), keys: Sequence[str] = ("row",)
) -> "DataFrame":
    import pyarrow as pa
    import pyarrow.parquet

    content = read_whole(path, hint=hint)
    wanted = {"part": pa.string()} | {name: pa.int64() for name in keys} | {name: pa.float64() for name in numbers}
    wanted |= {name: pa.string() for name in texts}
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(content))
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        encodings = {name for group in groups for c in range(group.num_columns) for name in group.column(c).encodings}
        # a dictionary can hold one long text for a million rows
        if not encodings <= {"PLAIN", "RLE"} or sum(g.total_byte_size for g in groups) > MAX_UNPACKING * len(content):
            raise ValueError("it would be far larger in memory")
        table = file.read()
        if dict(zip(table.schema.names, table.schema.types, strict=True)) != wanted or any(
            column.null_count for column in table.columns
        ):
            raise ValueError(f"its columns are not {', '.join(wanted)}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as numbers of a run: {error}", hint) from error
    return table.to_pandas()
