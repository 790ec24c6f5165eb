"""The shards of a recipe: a training and a validation split, from inputs of their own or held out of one."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.corpus.fingerprint import Identified
from exlm_cli.data.corpus.inputs import FileSource, iter_rows
from exlm_cli.data.corpus.sequences import Holdout, SkippedRows
from exlm_cli.data.corpus.shards import ShardWriter
from exlm_cli.data.corpus.tokenise import SplitSink, tokenise_rows
from exlm_cli.data.rows.records import LINE_FORMATS, SKIPPED_FILE, Row, format_of
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.progress import Progress

TRAIN, VALID = "train", "valid"
# Bundled data is the same whatever the seed of the run, so that runs over seeds share it.
TRAIN_SEED, VALID_SEED = 0, 1


def recipe_rows(
    recipe: PretrainRecipe, sources: list[Identified], seed: int, progress: Progress, label: str
) -> Generator[Row]:
    """Yield the rows of sources as a recipe's `data` section says."""
    data = recipe.data
    return iter_rows(
        [identified.source for identified in sources],
        kind=data.kind,
        column=data.column,
        max_rows=data.max_rows,
        bundled_rows=data.bundled_rows,
        seed=seed,
        progress=progress,
        label=label,
    )


@dataclass(frozen=True)
class Splits:
    """What the shards of a recipe are made of."""

    recipe: PretrainRecipe
    tokenizer: Tokenizer
    train: list[Identified]
    valid: list[Identified]
    fingerprint: str
    progress: Progress

    def write(self, folder: Path) -> int:
        """Write `train/`, `valid/` and `rejected.csv` into a folder; return how many rows were rejected.

        Raises:
            DataError: A row or a source cannot be used, or a split would be empty.
        """
        return self._write_given(folder) if self.valid else self._write_held_out(folder)

    def _write_given(self, folder: Path) -> int:
        with self._rejected(folder) as rejected:
            for split, sources, seed in ((TRAIN, self.train, TRAIN_SEED), (VALID, self.valid, VALID_SEED)):
                with self._writer(folder / split) as writer:
                    sink = self._sink(writer)
                    self._tokenise(sources, seed, f"tokenising {split}", [sink], lambda _: 0, rejected)
                if not writer.num_sequences:
                    raise self._no_usable_row(split, sources, rejected)
        return rejected.num_rows

    def _write_held_out(self, folder: Path) -> int:
        data = self.recipe.data
        sizes_bytes = [s.source.size_bytes for s in self.train if isinstance(s.source, FileSource)]
        total_bytes = sum(sizes_bytes) if len(sizes_bytes) == len(self.train) else None
        forced: bytes | None = None
        while True:
            holdout = Holdout(data.kind, data.valid_fraction, total_bytes, data.max_rows, forced)
            with (
                self._rejected(folder) as rejected,
                self._writer(folder / TRAIN) as train,
                self._writer(folder / VALID) as valid,
            ):
                sinks = [self._sink(train), self._sink(valid)]
                self._tokenise(self.train, TRAIN_SEED, "tokenising", sinks, holdout.takes, rejected)
            if valid.num_sequences or forced is not None:
                break
            if holdout.smallest is None:
                raise self._no_usable_row(TRAIN, self.train, rejected)
            # A small corpus, of which the hashes took nothing: take what came nearest.
            forced = holdout.smallest
        if not train.num_sequences or not valid.num_sequences:
            raise DataError(
                f"{_named(self.train)}: too few usable rows to hold some out for validation; {rejected.describe()}",
                "give more rows, or rows of their own with `data.valid`",
            )
        return rejected.num_rows

    def _tokenise(
        self,
        sources: list[Identified],
        seed: int,
        label: str,
        sinks: list[SplitSink],
        choose_sink: Callable[[Row], int],
        rejected: SkippedRows,
    ) -> None:
        with closing(recipe_rows(self.recipe, sources, seed, self.progress, label)) as rows:
            num_unknown = tokenise_rows(rows, self.tokenizer, self.recipe.data, sinks, choose_sink, rejected)
        if num_unknown:
            self.progress.message(f"[UNK] stands for {num_unknown:,} tokens that are not in the vocabulary")

    def _writer(self, directory: Path) -> ShardWriter:
        return ShardWriter(directory, vocab_size=self.tokenizer.vocab_size, fingerprint=self.fingerprint)

    def _sink(self, writer: ShardWriter) -> SplitSink:
        return SplitSink(writer, self.recipe.data, self.tokenizer)

    def _rejected(self, folder: Path) -> SkippedRows:
        return SkippedRows(folder / SKIPPED_FILE, self.recipe.data.on_invalid)

    def _no_usable_row(self, split: str, sources: list[Identified], rejected: SkippedRows) -> DataError:
        kind, source = self.recipe.data.kind, sources[0].source
        has_lines = isinstance(source, FileSource) and format_of(source.path) in LINE_FORMATS
        hint = f"name the column that holds the {kind} with `data.column=NAME`"
        if has_lines:
            hint = "the SMILES must be the first word of a line" if kind == "smiles" else "give a file with text in it"
        return DataError(f"`data.{split}`: no usable row in {_named(sources)}; {rejected.describe()}", hint)


def _named(sources: list[Identified]) -> str:
    others = f" and {len(sources) - 1:,} more" if len(sources) > 1 else ""
    return f"{sources[0].source}{others}"
