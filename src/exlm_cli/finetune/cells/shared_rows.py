"""Encoded rows of a run in files, which the workers of its cells map into memory: read, parsed and tokenised once.

`rows/` of a run directory is there while workers train its cells. A sequence of tokens is in it once, however many
splits its row is in; a part of a split is a list of places in these sequences.

Axes: M sequences, T tokens of all of them, N examples of a part, C targets.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.tasks import TaskConfig
from exlm_cli.data import IntArray
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.files import make_folder, refusing, write_atomically
from exlm_cli.finetune.cells.trainer import TaskData
from exlm_cli.run_dir import ROWS_FOLDER
from exlm_cli.tasks.base import EncodedRows, EncodedSplit, Split
from exlm_cli.tasks.registry import restore_split

_FIELDS = ("name", "loss", "output_names", "selection_metric", "is_greater_better", "fingerprint", "num_repeats")
"""What is written of `TaskData` as it is."""


def can_be_shared(data: TaskData) -> bool:
    """Return whether workers can score the rows; those of another package may not leave this process."""
    return all(rows.stored() is not None for rows in data.scored.values())


def write_shared_rows(run: Path, splits: Mapping[int, TaskData]) -> None:
    """Write the rows of every split for workers.

    Args:
        splits: By `task.split_seed`; each `can_be_shared`.

    Raises:
        CheckpointError: A file cannot be written.
    """
    folder = run / ROWS_FOLDER
    remove_shared_rows(run)
    make_folder(folder)
    places: dict[int, int] = {}
    sequences: list[tuple[IntArray, NDArray[np.bool_] | None]] = []
    for split_seed, data in splits.items():
        for part, rows in data.parts.items():
            for index, token_ids in enumerate(rows.token_ids):
                if id(token_ids) not in places:
                    places[id(token_ids)] = len(sequences)
                    sequences.append((token_ids, None if rows.answerable is None else rows.answerable[index]))
            _save(folder / f"{split_seed}-{part}-places.npy", np.array([places[id(ids)] for ids in rows.token_ids]))
            _save(folder / f"{split_seed}-{part}-targets.npy", rows.targets)
            if rows.descriptors is not None:
                _save(folder / f"{split_seed}-{part}-descriptors.npy", rows.descriptors)
        content = {
            **{name: getattr(data, name) for name in _FIELDS},
            "class_weights": None if data.class_weights is None else data.class_weights.tolist(),
            "scored": {part: rows.stored() for part, rows in data.scored.items()},
        }
        if data.descriptor_quantiles is not None:
            _save(folder / f"{split_seed}-quantiles.npy", data.descriptor_quantiles)
        write_atomically(folder / f"{split_seed}.json", json.dumps(content).encode())
    _save(folder / "ends.npy", np.cumsum([len(token_ids) for token_ids, _ in sequences]))
    _save(folder / "tokens.npy", np.concatenate([token_ids.astype(np.int32) for token_ids, _ in sequences]))
    if masks := [mask for _, mask in sequences if mask is not None]:
        _save(folder / "answerable.npy", np.concatenate(masks))


def remove_shared_rows(run: Path) -> None:
    """Delete the rows once no worker needs them."""
    shutil.rmtree(run / ROWS_FOLDER, ignore_errors=True)


def read_shared_rows(
    run: Path, split_seed: int, config: TaskConfig, tokenizer: Tokenizer, sequence_length: int
) -> TaskData:
    """Return one split of a run, its tokens mapped from the files.

    Args:
        config, tokenizer, sequence_length: What the rows were encoded with.
    """
    folder = run / ROWS_FOLDER
    content = json.loads((folder / f"{split_seed}.json").read_bytes())
    ends = np.load(folder / "ends.npy")
    tokens = _split(folder / "tokens.npy", ends)
    masks = _split(folder / "answerable.npy", ends) if (folder / "answerable.npy").is_file() else None

    def mapped(name: str) -> NDArray[Any] | None:
        path = folder / f"{split_seed}-{name}.npy"
        return np.asarray(np.load(path, mmap_mode="c")) if path.is_file() else None

    def rows_of(part: Split) -> EncodedRows:
        places = np.load(folder / f"{split_seed}-{part}-places.npy").tolist()
        return EncodedRows(
            tuple(tokens[place] for place in places),
            np.load(folder / f"{split_seed}-{part}-targets.npy"),
            None if masks is None else tuple(masks[place] for place in places),
            descriptors=mapped(f"{part}-descriptors"),
        )

    def scored(part: Split, stored: Mapping[str, Any]) -> EncodedSplit:
        return restore_split(stored, rows_of(part), config, tokenizer, sequence_length)

    weights = content["class_weights"]
    fields = {name: content[name] for name in _FIELDS}
    return TaskData(
        **{**fields, "output_names": tuple(fields["output_names"])},
        class_weights=None if weights is None else np.array(weights),
        train=rows_of("train"),
        scored={part: scored(part, stored) for part, stored in content["scored"].items()},
        tokenizer=tokenizer,
        descriptor_quantiles=mapped("quantiles"),
    )


def _save(path: Path, array: NDArray[Any]) -> None:
    with refusing(f"{path}: the file could not be written"), path.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def _split(path: Path, ends: IntArray) -> list[NDArray[Any]]:
    """Return (M) pieces of a mapped file; torch takes only arrays that it may write, and no write reaches the file."""
    return np.split(np.asarray(np.load(path, mmap_mode="c")), ends[:-1])
