"""Which rows of a corpus are held out."""

import math

import pytest

from exlm_cli.data.corpus.holdout import Holdout
from exlm_cli.data.rows.records import Row


def _rows(count: int, starts: bool = True) -> list[Row]:
    return [Row("a", n, f"row {n}", starts_document=starts or n == 1) for n in range(1, count + 1)]


@pytest.mark.parametrize(("kind", "fraction"), [("text", 0.01), ("smiles", 0.25)])
def test_about_the_asked_share_is_held_out(kind, fraction):
    holdout = Holdout(kind, fraction, None)
    count = 20_000
    held_out = sum(holdout.takes(row) for row in _rows(count))
    assert abs(held_out - fraction * count) <= 5 * math.sqrt(count * fraction * (1 - fraction))


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
