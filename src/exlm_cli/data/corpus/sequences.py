"""Tokens of rows, cut or packed into sequences, and written to the shards of their splits."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, final

from exlm_cli.config.sections import DataConfig
from exlm_cli.data.corpus.fingerprint import Corpus
from exlm_cli.data.corpus.holdout import Holdout
from exlm_cli.data.corpus.kept import Kept
from exlm_cli.data.corpus.shards import SPELLINGS, TRAIN, VALID, ShardWriter, Written
from exlm_cli.data.rows.records import Row

NUM_ENDS = 2
"""[CLS] and [SEP], which every sequence gets when it is used."""


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
