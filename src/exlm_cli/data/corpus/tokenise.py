"""Rows to shards: validity, batched tokenisation, and the cutting into sequences."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

from exlm_cli.config.sections import DataConfig
from exlm_cli.data.corpus.sequences import Packer, SkippedRows, cut_row
from exlm_cli.data.corpus.shards import ShardWriter
from exlm_cli.data.rows.records import Row
from exlm_cli.data.smiles_check import check_smiles
from exlm_cli.data.tokenizer import Tokenizer

_BATCH_ROWS, _BATCH_CHARACTERS = 4096, 1 << 19
_NUM_ENDS = 2
"""[CLS] and [SEP], which every sequence gets when it is used."""


@final
class SplitSink:
    """Where the rows of one split go: cut or packed into sequences, and on to its shards."""

    def __init__(self, writer: ShardWriter, data: DataConfig, tokenizer: Tokenizer) -> None:
        self.writer = writer
        self._size = data.sequence_length - _NUM_ENDS
        self._packer: Packer | None = None
        if data.kind == "text" and data.sample_break == "none":
            self._packer = Packer(self._size, tokenizer.sep_id, tokenizer.encode("\n"))
        self._pending: list[list[int]] = []

    def add(self, ids: list[int], *, starts_document: bool) -> None:
        """Take the tokens of one row."""
        if self._packer is None:
            self._pending += cut_row(ids, self._size)
        else:
            self._pending += self._packer.add(ids, starts_document=starts_document)

    def flush(self) -> None:
        """Write the sequences that are complete."""
        self.writer.add(self._pending)
        self._pending = []

    def finish(self) -> None:
        """Write the rest."""
        if self._packer is not None:
            self._pending += self._packer.finish()
        self.flush()


def tokenise_rows(
    rows: Iterable[Row],
    tokenizer: Tokenizer,
    data: DataConfig,
    sinks: Sequence[SplitSink],
    choose_sink: Callable[[Row], int],
    rejected: SkippedRows,
) -> int:
    """Tokenise rows in batches, on all cores, and hand each to its split.

    Args:
        rows: In order.
        tokenizer: For text or SMILES, as `data.kind` says.
        data: How rows are cut.
        sinks: One per split; finished here.
        choose_sink: Index of the sink that a row goes to; asked in order, of usable rows only.
        rejected: Gets rows that cannot be used.

    Returns:
        How many tokens are [UNK].

    Raises:
        DataError: Such a row, where `data.on_invalid` is "error".
    """
    room = data.sequence_length - _NUM_ENDS
    num_unknown = 0
    last: SplitSink | None = None
    for batch in _batches(_usable(rows, data, rejected)):
        for row, ids in zip(batch, tokenizer.encode_batch([row.text for row in batch]), strict=True):
            if data.kind == "smiles" and len(ids) > room:
                rejected.add(row, f"{len(ids)} tokens, but `data.sequence_length` leaves room for {room}")
                continue
            unknown = ids.count(tokenizer.unk_id)
            if data.kind == "smiles" and unknown == len(ids):
                rejected.add(row, "none of its tokens is in the vocabulary, so that nothing of it can be masked")
                continue
            num_unknown += unknown
            sink = sinks[choose_sink(row)]
            # Rows that stood apart in the corpus must not look like neighbours.
            sink.add(ids, starts_document=row.starts_document or sink is not last)
            last = sink
        for sink in sinks:
            sink.flush()
    for sink in sinks:
        sink.finish()
    return num_unknown


def _usable(rows: Iterable[Row], data: DataConfig, rejected: SkippedRows) -> Iterator[Row]:
    """Drop empty text, refuse what is broken or no molecule."""
    checked = check_smiles(rows) if data.kind == "smiles" else ((row, row.problem) for row in rows)
    for row, problem in checked:
        if problem is not None:
            rejected.add(row, problem)
        elif row.text:
            yield row


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Group rows so that many are tokenised at once and long ones do not add up."""
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.text)
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
