"""Passes over the rows of a corpus: they are tokenised, cut or packed into sequences and written to the shards.

Rows are tokenised in batches. Every 64 of them, all files are brought to disk and `Kept` records where the work stands.
A later process cuts the files to that and goes on, and the shards are those of an undisturbed one, byte for byte.
"""

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, final

from exlm_cli.config.sections import DataConfig
from exlm_cli.data.corpus.fingerprint import Corpus, FingerprintedSource
from exlm_cli.data.corpus.holdout import Holdout
from exlm_cli.data.corpus.inputs import FileSource, first_row, iter_rows
from exlm_cli.data.corpus.kept import Kept, Listed, RowsRead, Tally, forget, keep, take_up
from exlm_cli.data.corpus.shards import SPELLINGS, TRAIN, VALID, ShardWriter, Written
from exlm_cli.data.rows.records import LINE_FORMATS, SKIPPED_COLUMNS, SKIPPED_FILE, Row, format_of
from exlm_cli.data.spellings import read_smiles
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.files import csv_line
from exlm_cli.format import format_number_of, shorten
from exlm_cli.progress import Progress

TRAIN_SEED, _VALID_SEED = 0, 1
"""Bundled data is the same whatever the seed of the run, so that runs over seeds share it."""
_BATCH_ROWS, _BATCH_CHARACTERS = 4096, 1 << 19
_KEPT_BATCHES = 64
_LARGE_HOLDOUT = 0.2
"""Share of the tokens for validation above which a warning is due."""
NUM_ENDS = 2
"""[CLS] and [SEP], which every sequence gets when it is used."""
_SHOWN_CHARACTERS = 80


def write_shards(corpus: Corpus, folder: Path, progress: Progress) -> int:
    """Write `train/`, `valid/` and the like, and the list of skipped rows, into a folder; return how many are skipped.

    The folder holds nothing else, or what an interrupted process has left there: then this one goes on.

    Raises:
        DataError: A row cannot be used, or too few can.
    """
    kept = take_up(folder)
    if kept is not None:
        tokens = sum(written.num_tokens for written in kept.written.values())
        rows = format_number_of(kept.rows.num_rows, "row")
        progress.message(f"going on after {rows}, {tokens:,} tokens, that an interrupted process has left")
    write = _write_given_splits if corpus.valid else _write_held_out_splits
    return write(corpus, folder, kept, progress)


def check_first_rows(sources: Sequence[FingerprintedSource], data: DataConfig) -> None:
    """Read the first row of every file, so that one without the column is refused before the others are read."""
    for known in sources:
        if isinstance(known.source, FileSource):
            row = first_row(known.source, data)
            if row is not None and row.problem is not None and data.on_invalid == "error" and not row.is_null:
                raise invalid_row(row, row.problem)


# Rows that cannot be used


@final
class SkippedRows:
    """Rows that cannot be used: the first one raises, or all are counted and written to a CSV."""

    def __init__(self, path: Path, on_invalid: Literal["error", "skip"], kept: Kept | None) -> None:
        self.path = path
        self.on_invalid = on_invalid
        self.listed = Listed() if kept is None else kept.skipped
        self._is_begun = kept is not None

    def __enter__(self) -> Self:
        mode = "a" if self._is_begun else "w"
        self._file = self.path.open(mode, encoding="utf-8", errors="backslashreplace", newline="")
        if not self._is_begun:
            self._file.write(csv_line(SKIPPED_COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row, reason: str) -> None:
        """Skip a row.

        Raises:
            DataError: `on_invalid` is `error`, and the row is not null.
        """
        if self.on_invalid == "error" and not row.is_null:
            raise invalid_row(row, reason)
        self.listed.num_rows += 1
        self.listed.first = self.listed.first or _describe(row, reason)
        self._file.write(csv_line((row.source, row.number, reason, row.text)))

    def sync(self) -> None:
        """Wait until the list is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def describe(self) -> str:
        """Return how many there are and what is wrong with the first, as the end of a sentence; empty for none."""
        if not self.listed.num_rows:
            return ""
        return f"; {format_number_of(self.listed.num_rows, 'row')} skipped, the first: {self.listed.first}"


def invalid_row(row: Row, reason: str) -> DataError:
    """Return the error for a row that cannot be used."""
    return DataError(_describe(row, reason), "`--on-invalid skip` skips such rows and lists them in a CSV")


def _describe(row: Row, reason: str) -> str:
    shown = shorten(" ".join(row.text.split()), _SHOWN_CHARACTERS)
    return f"{row.source}:{row.number}: `{shown}`: {reason}" if shown else f"{row.source}:{row.number}: {reason}"


# Splits: two inputs, or one of which rows are held out


def _write_given_splits(corpus: Corpus, folder: Path, kept: Kept | None, progress: Progress) -> int:
    data = corpus.recipe.data
    with SkippedRows(folder / SKIPPED_FILE, data.on_invalid, kept) as skipped:
        for split, sources in ((VALID, corpus.valid), (TRAIN, corpus.train)):
            if not sources or (kept is not None and split not in kept.written):
                continue  # nothing is trained, or the split is whole
            written = _write_sequences(corpus, sources, folder, [split], None, skipped, kept, progress)
            kept = None
            if not written[split].num_sequences:
                raise _no_usable_row(data, f"`data.{split}`: " if corpus.train else "", sources, skipped)
    return skipped.listed.num_rows


def _write_held_out_splits(corpus: Corpus, folder: Path, kept: Kept | None, progress: Progress) -> int:
    data = corpus.recipe.data
    sizes_bytes = [known.source.size_bytes for known in corpus.train if isinstance(known.source, FileSource)]
    total_bytes = sum(sizes_bytes) if len(sizes_bytes) == len(corpus.train) else None

    def write(kept: Kept | None, forced: int | None) -> tuple[Holdout, SkippedRows, Written, Written]:
        at = None if kept is None else kept.holdout
        holdout = Holdout(data.kind, data.valid_fraction, total_bytes, data.max_rows, forced, at)
        with SkippedRows(folder / SKIPPED_FILE, data.on_invalid, kept) as skipped:
            written = _write_sequences(corpus, corpus.train, folder, [TRAIN, VALID], holdout, skipped, kept, progress)
        return holdout, skipped, written[TRAIN], written[VALID]

    holdout, skipped, train, valid = write(kept, None if kept is None else kept.forced)
    if not valid.num_sequences and holdout.forced is None:
        if holdout.at.smallest is None:
            raise _no_usable_row(data, f"`data.{TRAIN}`: ", corpus.train, skipped)
        # The hashes chose nothing of a small corpus: hold out the smallest hash.
        _, skipped, train, valid = write(None, holdout.at.smallest)
    if not train.num_sequences or not valid.num_sequences:
        raise DataError(
            f"{_named(corpus.train)}: too few usable rows to hold some out for validation{skipped.describe()}",
            "give more rows, or rows of their own with `data.valid`",
        )
    share = valid.num_tokens / (train.num_tokens + valid.num_tokens)
    if share > max(_LARGE_HOLDOUT, 2 * data.valid_fraction):
        progress.message(
            f"warning: {share:.0%} of the tokens are held out for validation, where `data.valid_fraction` is "
            f"{data.valid_fraction:g}: a row, or a document, is held out whole"
        )
    return skipped.listed.num_rows


def _no_usable_row(
    data: DataConfig, key: str, sources: Sequence[FingerprintedSource], skipped: SkippedRows
) -> DataError:
    files = (known.source for known in sources)
    has_columns = not all(isinstance(file, FileSource) and format_of(file.path) in LINE_FORMATS for file in files)
    hint = f"name the column that holds the {data.kind} with `--set data.column=NAME`, or " if has_columns else ""
    hint += "give other rows"
    return DataError(f"{key}no usable row in {_named(sources)}{skipped.describe()}", hint)


# Rows -> tokens


def _write_sequences(
    corpus: Corpus,
    sources: Sequence[FingerprintedSource],
    folder: Path,
    splits: Sequence[str],
    holdout: Holdout | None,
    skipped: SkippedRows,
    kept: Kept | None,
    progress: Progress,
) -> dict[str, Written]:
    """Tokenise rows and write the sequences of each split; return how much is written.

    `holdout` chooses among the splits; None: there is one. `kept` is where the pass over the rows stands; None: it
    begins.

    Raises:
        DataError: Nothing can be masked in any sequence.
    """
    data = corpus.recipe.data
    seed = _VALID_SEED if splits == [VALID] else TRAIN_SEED
    label = "tokenising" if len(splits) > 1 else f"tokenising {splits[0]}"
    if kept is None:
        forget(folder)
        kept = Kept()
    num_done, ends = kept.rows.num_rows, kept.rows.ends
    with (
        SequenceWriter(corpus, folder, splits, holdout, kept) as sequences,
        reading(sources, data, seed, progress, label, num_done, ends) as rows,
    ):
        for number, (num_rows, batch) in enumerate(_batches(_usable(rows, data, skipped, num_done)), start=1):
            for row, ids, spellings in _tokenise(batch, data, corpus.tokenizer, skipped):
                sequences.add(row, ids, spellings)
            if number % _KEPT_BATCHES == 0:
                skipped.sync()
                done = RowsRead(num_rows, [end for end in ends if end <= num_rows])
                keep(folder, sequences.sync().model_copy(update={"rows": done, "skipped": skipped.listed}))
        sequences.finish()
    written, tally = sequences.written, sequences.tally
    if tally.num_left_out and not any(one.num_sequences for one in written.values()):
        raise DataError(
            f"{_named(sources)}: none of its tokens is in the vocabulary, so that nothing of it can be masked",
            "give other rows, or a tokenizer that covers them with `--set tokenizer.path=FILE`",
        )
    # with an empty split there is an error, or all rows are read again
    if all(written[split].num_sequences for split in splits):
        _report(tally, progress)
    return written


def _report(tally: Tally, progress: Progress) -> None:
    """Report what the vocabulary or the length of a sequence leaves out."""
    if tally.num_unknown:
        left_out = format_number_of(tally.num_left_out, "sequence")
        also = f"; {left_out} of nothing else left out" if tally.num_left_out else ""
        progress.message(f"[UNK] replaces {format_number_of(tally.num_unknown, 'token')} outside the vocabulary{also}")
    if tally.num_too_long:
        left_out = format_number_of(tally.num_too_long, "spelling")
        progress.message(f"{left_out} left out, of more tokens than `data.sequence_length` leaves room for")


def reading(
    sources: Sequence[FingerprintedSource],
    data: DataConfig,
    seed: int,
    progress: Progress,
    label: str,
    num_done: int = 0,
    ends: list[int] | None = None,
) -> closing[Generator[Row]]:
    """Return the rows of sources, as `iter_rows` gives them, as a context that closes the files."""
    plain = [known.source for known in sources]
    return closing(iter_rows(plain, data, seed=seed, progress=progress, label=label, num_done=num_done, ends=ends))


def _usable(rows: Iterable[Row], data: DataConfig, skipped: SkippedRows, num_done: int) -> Iterator[tuple[int, Row]]:
    """Yield rows with text, molecules as `data.canonical_smiles` says; skip what is broken or not a molecule.

    With each comes the number of rows up to it, those `num_done` before included.
    """
    read = rows
    if data.kind == "smiles":
        read = read_smiles(rows, is_canonical=data.canonical_smiles, num_spellings=data.num_spellings)
    for number, row in enumerate(read, start=num_done + 1):
        if row.problem is not None:
            skipped.add(row, row.problem)
        elif row.text:
            yield number, row


def _tokenise(
    batch: Sequence[Row], data: DataConfig, tokenizer: Tokenizer, skipped: SkippedRows
) -> Iterator[tuple[Row, list[int], list[list[int]]]]:
    """Yield rows with their token ids and those of their other spellings, tokenised on all cores.

    SMILES that do not fit are skipped, and rows of [UNK] alone that are sequences of their own. Other spellings that do
    not fit are left out.
    """
    room = data.sequence_length - NUM_ENDS
    packs = packs_rows(data)
    encoded = iter(tokenizer.encode_batch([text for row in batch for text in (row.text, *row.spellings)]))
    for row in batch:
        ids, *others = islice(encoded, 1 + len(row.spellings))
        if data.kind == "smiles" and len(ids) > room:
            skipped.add(row, f"{len(ids)} tokens, but `data.sequence_length` leaves room for {room}")
        elif not packs and ids.count(tokenizer.unk_id) == len(ids):
            skipped.add(row, "none of its tokens is in the vocabulary, so that nothing of it can be masked")
        else:
            yield row, ids, [spelling for spelling in others if len(spelling) <= room]


def _batches(numbered: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, list[Row]]]:
    """Yield rows in groups of limited number and length, each with the number of its last row; read none ahead."""
    number, batch, characters = 0, [], 0
    for number, row in numbered:
        batch.append(row)
        characters += sum(map(len, (row.text, *row.spellings)))
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield number, batch
            batch, characters = [], 0
    if batch:
        yield number, batch


def _named(sources: Sequence[FingerprintedSource]) -> str:
    others = f" and {len(sources) - 1:,} more" if len(sources) > 1 else ""
    return f"{sources[0].source}{others}"


# Tokens -> sequences of their splits


@final
class SequenceWriter:
    """The rows of a pass, cut or packed into sequences, and written to the shards of their splits.

    All spellings of a training molecule follow each other. Of a validation molecule the first other one goes to
    `SPELLINGS`, in which each molecule counts once; only small molecules may lack it with fewer spellings. Sequences in
    which nothing can be masked are left out.
    """

    def __init__(
        self, corpus: Corpus, folder: Path, splits: Sequence[str], holdout: Holdout | None, kept: Kept
    ) -> None:
        data, tokenizer = corpus.recipe.data, corpus.tokenizer
        self._tokenizer, self._splits, self._holdout = tokenizer, list(splits), holdout
        self._size, newline_ids = data.sequence_length - NUM_ENDS, tokenizer.encode("\n")
        also_spelled = [SPELLINGS] if data.num_spellings > 1 and VALID in splits else []
        self._writers = {
            split: ShardWriter(folder / split, tokenizer.vocab_size, corpus.fingerprint, kept.written.get(split))
            for split in (*splits, *also_spelled)
        }
        self._packers = {
            split: Packer(self._size, tokenizer.sep_id, newline_ids, kept.pending.get(split))
            for split in splits
            if packs_rows(data)
        }
        self.tally = kept.tally

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for writer in self._writers.values():
                stack.enter_context(writer)
            self._files = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    @property
    def written(self) -> dict[str, Written]:
        """How much each split has."""
        return {split: writer.written for split, writer in self._writers.items()}

    def add(self, row: Row, ids: list[int], spellings: list[list[int]]) -> None:
        """Add the ids of a row and of its other spellings that are short enough; rows come in order."""
        tally = self.tally
        tally.num_unknown += sum(one.count(self._tokenizer.unk_id) for one in (ids, *spellings))
        tally.num_too_long += len(row.spellings) - len(spellings)
        split = self._splits[0] if self._holdout is None else VALID if self._holdout.takes(row) else TRAIN
        if self._packers:
            # rows that were apart in the corpus must not look like neighbours
            starts_document = row.starts_document or split != tally.last_split
            self._write(split, self._packers[split].add(ids, starts_document=starts_document))
        else:
            self._write(split, cut(ids, self._size))
        if spellings:
            self._write(*((SPELLINGS, spellings[:1]) if split == VALID else (split, spellings)))
        tally.last_split = split

    def finish(self) -> None:
        """Write what fills no sequence."""
        for split, packer in self._packers.items():
            self._write(split, packer.finish())

    def sync(self) -> Kept:
        """Bring all that is written to disk, and return where the pass stands, but for the rows that were read."""
        for writer in self._writers.values():
            writer.sync()
        return Kept(
            forced=None if self._holdout is None else self._holdout.forced,
            holdout=None if self._holdout is None else self._holdout.at,
            tally=self.tally,
            written=self.written,
            pending={split: packer.pending for split, packer in self._packers.items()},
        )

    def _write(self, split: str, sequences: list[list[int]]) -> None:
        """Write the sequences that have a token to mask, and count the others."""
        kept = [ids for ids in sequences if not self._tokenizer.special_ids.issuperset(ids)]
        self._writers[split].add(kept)
        self.tally.num_left_out += len(sequences) - len(kept)


def packs_rows(data: DataConfig) -> bool:
    """Return whether rows are packed into full sequences."""
    return data.kind == "text" and data.sample_break == "none"


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Return a row in pieces of at most `size` tokens."""
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@final
class Packer:
    """Makes sequences of exactly `size` tokens each, as RoBERTa's `sample-break-mode none`.

    [SEP] separates documents, a newline the lines of one document.

    Attributes:
        pending: Ids that fill no sequence yet; None before the first row.
    """

    def __init__(self, size: int, sep_id: int, newline_ids: Sequence[int], pending: list[int] | None = None) -> None:
        self.size = size
        self.pending = pending
        self._sep_ids = [sep_id]
        self._newline_ids = list(newline_ids)

    def add(self, ids: list[int], *, starts_document: bool) -> list[list[int]]:
        """Append a row and return the sequences that are full now."""
        if self.pending is None:
            self.pending = []
        else:
            self.pending += self._sep_ids if starts_document else self._newline_ids
        self.pending += ids
        num_whole = len(self.pending) // self.size * self.size
        full = cut(self.pending[:num_whole], self.size)
        del self.pending[:num_whole]
        return full

    def finish(self) -> list[list[int]]:
        """Return the remainder, if it holds at least two tokens."""
        return [self.pending] if self.pending is not None and len(self.pending) >= 2 else []
