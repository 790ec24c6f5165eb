"""What only the `reference` backend can get wrong: batches that are cut into chunks."""

import pytest
import torch

from exlm_cli.ops.alignment import reference, states_alignment_nll
from tests.unit.ops.alignment import dags
from tests.unit.ops.alignment.dags import assert_near, assert_same_bits, nll_and_gradients

T, S = 20, 90


@pytest.mark.parametrize("rows", [1, 3, 6], ids=lambda rows: f"{rows} a chunk")
def test_sequences_in_chunks_give_what_they_give_together(rows, monkeypatch):
    dag = dags.make(6, T, S, missing_edges=0.3, dtype=torch.float64)
    weights = torch.linspace(-1, 2, 6, dtype=torch.float64)
    together = nll_and_gradients(dag, "reference", weights)
    monkeypatch.setattr(reference, "_CPU_CHUNK_ELEMENTS", rows * T * S * S)
    assert_same_bits(nll_and_gradients(dag, "reference", weights), together)
    assert states_alignment_nll(*dag, backend="reference").equal(together[0])


def test_a_sequence_that_is_larger_than_a_chunk_has_its_matrices_computed_again(monkeypatch):
    dag = dags.make(3, T, S, dtype=torch.float64)
    monkeypatch.setattr(reference, "_CPU_CHUNK_ELEMENTS", T * S * S - 1)
    assert_near(nll_and_gradients(dag, "reference"), dags.truth(dag), 1e-12, 1e-12)
