"""How the ids of rows are packed or cut into sequences."""

from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_cli.data.corpus.write import Packer, cut

SEP, NEWLINE = 2, 9


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
