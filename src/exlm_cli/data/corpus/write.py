"""Passes over the rows of a corpus, which tokenise them and write the shards of its splits.

Rows are tokenised in batches. Every 64 of them, all files are brought to disk and `Kept` records where the work stands.
A later process cuts the files to that and goes on, and the shards are those of an undisturbed one, byte for byte.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from exlm_cli.config.sections import DataConfig
from exlm_cli.data.corpus.fingerprint import Corpus, FingerprintedSource
from exlm_cli.data.corpus.holdout import Holdout
from exlm_cli.data.corpus.inputs import FileSource, first_row, iter_rows
from exlm_cli.data.corpus.kept import Kept, RowsRead, Tally, forget, keep, take_up
from exlm_cli.data.corpus.sequences import NUM_ENDS, SequenceWriter, packs_rows
from exlm_cli.data.corpus.shards import TRAIN, VALID, Written
from exlm_cli.data.corpus.skipped import SkippedRows, invalid_row
from exlm_cli.data.rows.records import LINE_FORMATS, SKIPPED_FILE, Row, format_of
from exlm_cli.data.spellings import read_smiles
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of
from exlm_cli.progress import Progress

TRAIN_SEED, _VALID_SEED = 0, 1
"""Bundled data is the same whatever the seed of the run, so that runs over seeds share it."""
_BATCH_ROWS, _BATCH_CHARACTERS = 4096, 1 << 19
_KEPT_BATCHES = 64
_LARGE_HOLDOUT = 0.2
"""Share of the tokens for validation above which a warning is due."""


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


# Rows -> tokens -> sequences -> shards


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
