"""What only the `reference` backend can get wrong: batches that are cut into chunks, and the memory of a chunk."""

from collections import Counter
from typing import ClassVar
from unittest.mock import Mock

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


class _Kept:
    """A tensor that autograd keeps; `alive` has its storage as long as it does."""

    alive: ClassVar = Counter()
    most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        _Kept.alive[tensor.data_ptr()] += tensor.shape == (1, S, S)
        _Kept.most = max(_Kept.most, sum(count > 0 for count in _Kept.alive.values()))

    def __del__(self) -> None:
        _Kept.alive[self.tensor.data_ptr()] -= self.tensor.shape == (1, S, S)


@pytest.mark.parametrize(("limit", "matrices"), [(T * S * S, 2 * T + 4), (T * S * S - 1, 6)])
def test_autograd_keeps_the_matrices_of_one_chunk(limit, matrices, monkeypatch):
    """Two for each target, of a sequence at a time, or of one target where even one sequence is too large."""
    monkeypatch.setattr(reference, "_CPU_CHUNK_ELEMENTS", limit)
    monkeypatch.setattr(_Kept, "most", 0)
    dag = dags.make(6, T, S, is_ragged=False)
    with torch.autograd.graph.saved_tensors_hooks(_Kept, lambda kept: kept.tensor):
        nll_and_gradients(dag, "reference")
    assert 0 < _Kept.most <= matrices


def test_a_gradient_that_nobody_wants_is_not_computed(monkeypatch):
    log_emit, *others = dags.make(2, 3, 8)
    leaf = log_emit.requires_grad_()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.autograd, "grad", Mock(side_effect=AssertionError))
        assert not states_alignment_nll(leaf, *others, backend="reference").requires_grad
    nll = states_alignment_nll(leaf, *others, backend="reference")
    (gradient,) = torch.autograd.grad(nll.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
