"""Which rows are held out, and how their ids are packed or cut into sequences."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_cli.data.corpus.write import Holdout, Packer, cut
from exlm_cli.data.rows.records import Row

SEP, NEWLINE = 2, 9


def _rows(count: int, starts: bool = True) -> list[Row]:
    return [Row("a", n, f"row {n}", starts_document=starts or n == 1) for n in range(1, count + 1)]


@pytest.mark.parametrize("kind", ["text", "smiles"])
@pytest.mark.parametrize("fraction", [0.01, 0.25])
def test_about_the_asked_share_is_held_out(kind, fraction):
    holdout = Holdout(kind, fraction, None)
    count = 20_000
    held_out = sum(holdout.takes(row) for row in _rows(count))
    assert abs(held_out - fraction * count) <= 5 * math.sqrt(count * fraction * (1 - fraction))


def test_duplicate_smiles_are_on_one_side_every_time():
    holdout, again = (Holdout("smiles", 0.5, None) for _ in range(2))
    first = [holdout.takes(row) for row in _rows(100)]
    assert [holdout.takes(row) for row in reversed(_rows(100))] == first[::-1]
    assert [again.takes(row) for row in _rows(100)] == first


def test_a_document_stays_whole_where_the_corpus_is_large():
    holdout = Holdout("text", 0.3, None)
    for document in range(50):
        rows = [Row("a", n, f"text of {document}", starts_document=n == 0) for n in range(20)]
        assert len({holdout.takes(row) for row in rows}) == 1


@pytest.mark.parametrize(("total_bytes", "max_rows"), [(400_000, None), (10**9, 4000)])
def test_a_single_document_is_cut_into_blocks_of_many_rows(total_bytes, max_rows):
    rows = [Row("a", n, "x" * 100, starts_document=n == 0) for n in range(4000)]
    holdout = Holdout("text", 0.1, total_bytes, max_rows)
    sides = [holdout.takes(row) for row in rows]
    # 400 kB x 0.1 / 8 = 5,000 bytes a block, or 4,000 x 0.1 / 8 = 50 rows: 51 rows are the first to exceed both
    for start in range(0, 4000, 51):
        assert len(set(sides[start : start + 51])) == 1
    assert 0.02 < sum(sides) / 4000 < 0.25


def test_a_tiny_corpus_is_held_out_row_by_row():
    holdout = Holdout("text", 0.1, 100)
    rows = _rows(500, starts=False)
    sides = [holdout.takes(row) for row in rows]
    assert abs(sum(sides) - 50) <= 5 * math.sqrt(45)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.lists(st.integers(10, 99), min_size=1, max_size=9), min_size=1), min_size=1), st.integers(2, 7)
)
def test_packing_keeps_every_token_in_order_but_a_last_single_one(documents, size):
    """Newlines come between the rows of a document, and [SEP] between documents."""
    stream: list[int] = []
    packer, packed = Packer(size, SEP, [NEWLINE]), []
    for document in documents:
        stream += [SEP] * bool(stream)
        for number, ids in enumerate(document):
            stream += [NEWLINE] * bool(number) + ids
            packed += packer.add(ids, starts_document=number == 0)
    packed += packer.finish()
    assert all(len(sequence) == size for sequence in packed[:-1])
    assert all(0 < len(sequence) <= size for sequence in packed[-1:])
    flat = [token for sequence in packed for token in sequence]
    assert flat == (stream[:-1] if len(stream) % size == 1 else stream)


def test_a_long_row_is_cut_into_pieces():
    assert cut([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert cut([], 2) == []
