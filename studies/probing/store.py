"""The folder of a probing study: rows, embeddings and scores, so that it can be stopped and continued.

Axes: P properties, N resamplings.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exlm_cli.data.rows.table import read_table
from exlm_cli.errors import ConfigError
from exlm_cli.files import make_folder, write_csv
from exlm_cli.finetune.embed import embed, pretrained_encoder
from exlm_cli.progress import Progress
from exlm_cli.train.pretrained import Pretrained
from probing.scores import Features
from probing.targets import Numbers, ProbeData


@dataclass(frozen=True)
class Source:
    """What turns rows into vectors.

    Attributes:
        label: Model that it is a seed of.
        run: Run directory; empty for token counts.
        weights: What the vectors depend on: the hash of the weights, or the name of a baseline.
        pretrained: None for token counts.
    """

    label: str
    run: str
    weights: str
    pretrained: Pretrained | None


class Store:
    """Files of a study.

    Args:
        folder: Made where it does not exist.
    """

    header = ("label", "run", "weights", "vectors", "data", "property", "metric", "resampling", "score")

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.folder, self._path = folder, folder / "scores.csv"
        self._rows: list[dict[str, str]] = []
        if self._path.is_file():
            with self._path.open(encoding="utf-8", newline="") as file:
                self._rows = list(csv.DictReader(file))

    def write_inputs(self, data: ProbeData, kind: str) -> list[Path]:
        """Write each part of the rows as a table of one column, which is named like the kind.

        Raises:
            ConfigError: The folder holds a study of other rows.
        """
        paths = []
        for number, texts in enumerate(data.parts, start=1):
            path = self.folder / "rows" / f"{data.name}-{number}.csv"
            if path.is_file() and read_table(path).columns[kind] != texts:
                raise ConfigError(f"{path} holds other rows", "give another `--out`, or the options of before")
            make_folder(path.parent)
            write_csv(path, (kind,), [(text,) for text in texts])
            paths.append(path)
        return paths

    def vectors(self, source: Source, data: ProbeData, kind: str, pooling: str, progress: Progress) -> list[Features]:
        """Return the vectors of each part of the rows, from the folder where they were made before."""
        assert source.pretrained is not None, "token counts have no encoder"
        encoder = None
        found = []
        for path in self.write_inputs(data, kind):
            kept = self.folder / "embeddings" / f"{path.stem}-{source.weights[:16]}.npz"
            if not kept.is_file():
                encoder = encoder or pretrained_encoder(source.pretrained)
                progress.message(f"{source.label}: {source.run}: vectors of {len(data):,} rows of {path.stem}")
                embed(encoder, path, kept, column=kind, progress=progress)
            with np.load(kept) as arrays:
                found.append(arrays[pooling])
        return found

    def is_finished(self, source: Source, data: ProbeData, vectors: str, index: int) -> bool:
        """Return whether a resampling has a score for every property."""
        wanted = {"weights": source.weights, "vectors": vectors, "data": data.name, "resampling": str(index)}
        known = {row["property"] for row in self._rows if wanted.items() <= row.items()}
        return known >= set(data.properties)

    def add(self, source: Source, data: ProbeData, vectors: str, index: int, scores: Sequence[float]) -> None:
        """Store the scores of a resampling."""
        for name, metric, score in zip(data.properties, data.metrics, scores, strict=True):
            values = (source.label, source.run, source.weights, vectors, data.name, name, metric, index, repr(score))
            self._rows.append(dict(zip(self.header, map(str, values), strict=True)))
        write_csv(self._path, self.header, [tuple(row.values()) for row in self._rows])

    def scores(self, source: Source, data: ProbeData, vectors: str, num_resamplings: int) -> Numbers:
        """Return (N, P) scores of a data set."""
        found = {
            (int(row["resampling"]), row["property"]): float(row["score"])
            for row in self._rows
            if (row["weights"], row["vectors"], row["data"]) == (source.weights, vectors, data.name)
        }
        return np.array([[found[index, name] for name in data.properties] for index in range(num_resamplings)])
