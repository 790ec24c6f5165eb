r"""What can be read out of a run's vectors: linear probes on frozen embeddings, beside an untrained encoder and counts.

Pinned to commit 3d172fa5 (`README.md`); the lab notes give the commit of each table.

Each row of some held-out files is turned into a vector by `exlm embed`'s engine; a ridge or logistic regression on the
vectors then predicts properties that RDKit or the letters of a text give for every row, and the labels of GLUE tasks.
Thousands of test rows and many properties separate models that a small benchmark cannot. Each resampling cuts the same
rows into train and test for all runs, so that differences are paired.

    python studies/probe.py exlm=runs/exlm-1 exlm=runs/exlm-2 mlm=runs/mlm-1 mlm=runs/mlm-2 \
        --files held-out.smi.gz --reference mlm --out runs/probe
    python studies/probe.py exlm=runs/text-exlm mlm=runs/text-mlm --files held-out.txt.xz --glue-dir glue --out DIR

Runs of one label are seeds of one model. `untrained` are the encoders of the reference before their first step,
`token counts` a vector of how often each of the most frequent tokens occurs. DIR keeps the rows, the embeddings and
`scores.csv`; what is finished there is not computed again. Tables are written as CSV and Markdown.

Axes: R rows, F features, P properties, S seeds, N resamplings.
"""

import argparse
import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from exlm_cli.cli.console import emit_error, emit_renderable, open_progress
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError, ExlmError
from exlm_cli.format import NO_VALUE
from exlm_cli.progress import Progress
from exlm_cli.report.tables import ReportTable, write_tables
from exlm_cli.train.pretrained import build_model, load_pretrained
from probing.scores import Features, Interval, join_parts, paired_difference, probe_scores, resampling, token_counts
from probing.store import Source, Store
from probing.targets import Numbers, ProbeData, read_glue, read_molecules, read_texts

UNTRAINED, COUNTS = "untrained", "token counts"
TITLES = {"r2": "R2", "roc_auc": "ROC-AUC"}


@dataclass(frozen=True)
class Study:
    """Every source on every data set and resampling.

    Attributes:
        kind: What the rows are, `smiles` or `text`.
        pooling: Vectors of `exlm embed`: `mean` or `cls`.
        reference: Label that the others are compared with.
        tokenizer: Tokenizer of the token counts.
    """

    sources: Sequence[Source]
    datasets: Sequence[ProbeData]
    store: Store
    kind: str
    pooling: str
    reference: str
    num_resamplings: int
    tokenizer: Tokenizer

    def run(self, progress: Progress) -> None:
        """Compute the scores that are not in the store yet."""
        for source, data in itertools.product(self.sources, self.datasets):
            self.store.write_inputs(data, self.kind)
            vectors = self._vectors_of(source)
            resamplings = range(self.num_resamplings)
            left = [index for index in resamplings if not self.store.is_finished(source, data, vectors, index)]
            if not left:
                continue
            features = self._features(source, data, progress)
            with progress.bar(f"{source.label}, {data.name}", len(left)) as bar:
                for done, index in enumerate(left, start=1):
                    scores = probe_scores(features, data, *resampling(len(data), index))
                    self.store.add(source, data, vectors, index, scores)
                    bar.update(done)

    def tables(self) -> tuple[ReportTable, ReportTable]:
        """Return the means over all properties of a metric, and every property, with differences from the reference."""
        labels = list(dict.fromkeys(source.label for source in self.sources))
        scores_PSN = {label: self._scores_of(label) for label in labels}
        places = [
            (data.name, name, metric)
            for data in self.datasets
            for name, metric in zip(data.properties, data.metrics, strict=True)
        ]
        summary, details = [], []
        for metric in dict.fromkeys(metric for *_, metric in places):
            chosen = [index for index, (*_, of) in enumerate(places) if of == metric]
            mean_SN = {label: scores[chosen].mean(axis=0) for label, scores in scores_PSN.items()}
            summary.append(self._rows(f"{TITLES[metric]} of {len(chosen)}", mean_SN))
        for index, (data_name, name, metric) in enumerate(places):
            one_SN = {label: scores[index] for label, scores in scores_PSN.items()}
            details.append(self._rows(f"{data_name}: {name}, {TITLES[metric]}", one_SN))
        headings = ("score", "model", "mean", f"less {self.reference}", "over resamplings", "over seeds")
        sizes = ", ".join(f"{len(data):,} {data.name}" for data in self.datasets)
        note = (
            f"{self.pooling} vectors of {sizes}; differences with 95 % intervals: over {self.num_resamplings} "
            "resamplings of the rows for these runs, over seeds for runs like these"
        )
        return (
            ReportTable("probe", "Linear probes on frozen vectors", headings, tuple(summary), (note,), num_keys=2),
            ReportTable("probe-properties", "Every property", headings, tuple(details), (note,), num_keys=2),
        )

    def _vectors_of(self, source: Source) -> str:
        return COUNTS if source.pretrained is None else self.pooling

    def _features(self, source: Source, data: ProbeData, progress: Progress) -> Features:
        if source.pretrained is None:
            return join_parts(token_counts(data, self.tokenizer))
        return join_parts(self.store.vectors(source, data, self.kind, self.pooling, progress))

    def _scores_of(self, label: str) -> Numbers:
        """Return (P, S, N) scores of a model over all data sets."""
        seeds = [source for source in self.sources if source.label == label]
        parts = []
        for data in self.datasets:
            by_seed = [self.store.scores(s, data, self._vectors_of(s), self.num_resamplings).T for s in seeds]
            parts.append(np.stack(by_seed, axis=1))
        return np.concatenate(parts)

    def _rows(self, title: str, scores_SN: dict[str, Numbers]) -> tuple[tuple[str, ...], ...]:
        rows = []
        for label, own_SN in scores_SN.items():
            row = (title, label, f"{own_SN.mean():.4f}")
            if label == self.reference:
                rows.append((*row, NO_VALUE, NO_VALUE, NO_VALUE))
                continue
            found = paired_difference(own_SN, scores_SN[self.reference])
            rows.append(
                (*row, f"{found.mean:+.4f}", *map(_format_interval, (found.over_resamplings, found.over_seeds)))
            )
        return tuple(rows)


def _format_interval(interval: Interval | None) -> str:
    return NO_VALUE if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"


def load_sources(given: Sequence[str], reference: str | None, progress: Progress) -> tuple[list[Source], str]:
    """Return the runs, the baselines and the label of the reference.

    Args:
        given: `LABEL=RUN`, or `RUN`, whose label is the name of its folder.
        reference: Label that the others are compared with; none: the first.
        progress: Shows messages.

    Raises:
        ConfigError: Runs of different kinds, labels with different numbers of runs, or an unknown reference.
        CheckpointError: A run has no whole checkpoint.
    """
    sources = []
    for text in given:
        label, equals, run = text.partition("=")
        path = Path(run if equals else text)
        pretrained = load_pretrained(path, device="cpu", progress=progress)
        sources.append(Source(label if equals else path.name, str(path), pretrained.sha256, pretrained))
    counts = Counter(source.label for source in sources)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{label} {number}" for label, number in counts.items())
        raise ConfigError(f"models with different numbers of runs: {listed}", "give each as many seeds as the others")
    kinds = {source.pretrained.recipe.data.kind for source in sources if source.pretrained is not None}
    if len(kinds) > 1:
        raise ConfigError("some runs read SMILES and some text", "probe them one kind after the other")
    if reference is not None and reference not in counts:
        raise ConfigError(f"`--reference {reference}`: the models are {', '.join(counts)}", "name one of them")
    chosen = reference or sources[0].label
    return [*sources, *(_untrained(source) for source in sources if source.label == chosen)], chosen


def _untrained(source: Source) -> Source:
    """Return the encoder of a run as it was before its first step."""
    assert source.pretrained is not None, "a run has a model"
    recipe, tokenizer = source.pretrained.recipe, source.pretrained.tokenizer
    model = build_model(recipe, tokenizer, next(source.pretrained.model.parameters()).device).eval()
    digest = hashlib.sha256(f"{source.weights} before training".encode()).hexdigest()
    return Source(UNTRAINED, source.run, digest, replace(source.pretrained, model=model))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and print its summary; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "runs", nargs="+", metavar="[LABEL=]RUN", help="pre-training runs; one label: seeds of one model"
    )
    parser.add_argument("--files", nargs="*", type=Path, default=[], help="held-out SMILES or texts")
    parser.add_argument("--column", help="column of CSV files with the SMILES or text; default: `smiles` or `text`")
    parser.add_argument("--glue-dir", type=Path, help="folder with official GLUE folders, for runs on text")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study; continues what it holds")
    parser.add_argument("--rows", type=int, default=20000, help="rows drawn from each data set")
    parser.add_argument("--resamplings", type=int, default=10, help="cuts into training and test rows")
    parser.add_argument("--vectors", choices=("mean", "cls"), default="mean", help="which vector of `exlm embed`")
    parser.add_argument("--reference", help="label that the others are compared with; default: the first")
    options = parser.parse_args(arguments)
    progress = open_progress()
    try:
        sources, reference = load_sources(options.runs, options.reference, progress)
        first = sources[0].pretrained
        assert first is not None, "the first source is a run"
        kind = first.recipe.data.kind
        datasets = read_data(kind, options, progress)
        sources.append(Source(COUNTS, "", f"tokens of {sources[0].weights}", None))
        study = Study(
            sources=sources,
            datasets=datasets,
            store=Store(options.out),
            kind=kind,
            pooling=options.vectors,
            reference=reference,
            num_resamplings=options.resamplings,
            tokenizer=first.tokenizer,
        )
        study.run(progress)
        summary, details = study.tables()
        write_tables([summary, details], options.out, ("csv", "markdown"))
    except ExlmError as error:
        emit_error(error.message, error.hint)
        return 2
    emit_renderable(summary)
    return 0


def read_data(kind: str, options: argparse.Namespace, progress: Progress) -> list[ProbeData]:
    """Return the data sets of a kind of input.

    Raises:
        ConfigError: There are none.
        DataError: A file cannot be read.
    """
    files, num_rows = options.files, options.rows
    found = []
    if files and kind == "smiles":
        found.append(read_molecules(files, num_rows, options.column, options.out / "rows" / "molecules.npz", progress))
    elif files:
        found.append(read_texts(files, num_rows, options.column, progress))
    if options.glue_dir is not None and kind == "text":
        found += read_glue(options.glue_dir, num_rows, progress)
    if not found:
        raise ConfigError(
            "no rows to probe", "give held-out files with `--files`" + " or `--glue-dir`" * (kind == "text")
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
