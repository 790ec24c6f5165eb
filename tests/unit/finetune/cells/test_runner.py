"""Batches of a task: repetition as in pre-training, padding, targets that stay with their rows; losses by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data.masking import Masker
from exlm_cli.finetune.cells.runner import TaskBatch, batch_losses, collate, index_labels, repeated_lengths
from exlm_cli.tasks.base import EncodedRows
from tests.tiny import SPECIAL, sequences

IDS = (np.array([1, 7, 8, 2]), np.array([1, 9, 2]), np.array([1, 2]))
SPLIT = EncodedRows(IDS, np.array([[0.0, np.nan], [1.0, 2.0], [3.0, 4.0]]))


def test_rows_are_padded_and_keep_their_targets_and_their_place():
    """Tokens that may answer a question stay those before repetition."""
    answerable = (np.array([True, True, True, False]), np.array([True, True, False]), np.array([True, False]))
    batch = collate(replace(SPLIT, answerable=answerable), np.array([1, 0]), num_repeats=2, pad_id=0)
    assert batch.token_ids.tolist() == [[1, 9, 9, 2, 0, 0], [1, 7, 7, 8, 8, 2]]
    assert batch.lengths.tolist() == [4, 6]
    assert batch.sample_index.tolist() == [1, 0]
    expected = torch.tensor([[1, 2], [0, float("nan")]], dtype=torch.float64)
    torch.testing.assert_close(batch.targets, expected, equal_nan=True)
    assert batch.answerable is not None
    assert batch.answerable.tolist() == [[True, True, False, False], [True, True, True, False]]


@pytest.mark.parametrize("num_repeats", [1, 2, 4])
def test_tokens_are_repeated_as_pre_training_repeats_them(num_repeats):
    batch = collate(SPLIT, np.arange(3), num_repeats=num_repeats, pad_id=0)
    assert batch.lengths.tolist() == repeated_lengths(SPLIT, np.arange(3), num_repeats).tolist()
    masking = MaskingConfig(num_repeats=num_repeats)
    for row, ids in enumerate(IDS[:2]):
        masked = Masker(masking, SPECIAL, seed=0, epoch=0).mask(sequences([ids[1:-1]]))
        original = masked.input_ids[0]
        original[masked.is_masked[0]] = masked.target_ids
        assert batch.token_ids[row, : batch.lengths[row]].tolist() == original.tolist()


def test_both_texts_of_a_pair_are_rows_of_their_own_where_they_are_read_alone():
    pairs = EncodedRows((np.array([1, 7, 8, 2, 9, 2]), np.array([1, 2, 6, 5, 2])), np.zeros((2, 1)), is_pairs=True)
    batch = collate(pairs, np.arange(2), num_repeats=2, pad_id=0, pairs_of=SPECIAL)
    assert batch.token_ids.tolist() == [[1, 7, 7, 8, 8, 2], [1, 2, 0, 0, 0, 0], [1, 9, 9, 2, 0, 0], [1, 6, 6, 5, 5, 2]]
    assert batch.lengths.tolist() == [6, 2, 4, 6]
    assert batch.sample_index.tolist() == [0, 1]


NAN = math.nan


def targets_alone(targets: list[list[float]], answerable: list[list[bool]] | None = None) -> TaskBatch:
    empty = torch.zeros(len(targets), 1, dtype=torch.long)
    mask = None if answerable is None else torch.tensor(answerable)
    given = np.array(targets)
    tensor = torch.tensor(targets, dtype=torch.float32)
    return TaskBatch(empty, empty[:, 0], tensor, mask, empty[:, 0], index_labels(given), False, len(targets))


def nll(logit: float, label: int) -> float:
    return math.log1p(math.exp(-logit if label else logit))


LN3, LN_4_3 = math.log(3.0), math.log(4 / 3)
BINARY = [[0.3, -1.0], [2.0, 0.5], [1.0, 1.0]]
CLASSES = [[0.0, LN3], [0.0, LN3], [5.0, 0.0]]


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "weights", "expected"),
    [
        # as Uni-Mol: the sum over all labels of the batch that are present, divided by their number
        ("binary", BINARY, [[1, 0], [NAN, 1], [NAN, NAN]], None, [nll(0.3, 1), nll(-1.0, 0), nll(0.5, 1), math.inf]),
        # weights of labels are those of positives
        ("binary", BINARY[:1], [[1, 0]], [3.0, 5.0], [3 * nll(0.3, 1), nll(-1.0, 0)]),
        ("classes", CLASSES, [[1], [0], [NAN]], None, [LN_4_3, math.log(4), math.inf]),
        ("classes", CLASSES, [[1], [0], [NAN]], [2.0, 0.5], [0.5 * LN_4_3, 2 * math.log(4), math.inf]),
        # the mean square over the values that are present
        ("regression", [[1.0, 2.0], [1, 2], [0, 0]], [[0, 5], [NAN, 4], [NAN, NAN]], None, [(1 + 9) / 2, 4, math.inf]),
    ],
)
def test_losses_by_hand(loss, outputs, targets, weights, expected):
    given = None if weights is None else torch.tensor(weights)
    losses = batch_losses(loss, torch.tensor(outputs), targets_alone(targets), given)
    assert losses.tolist() == pytest.approx(expected)


INF = math.inf


def test_the_loss_of_a_censored_value_counts_the_wrong_side_alone():
    """And so does its gradient, which is that of a squared error there and zero elsewhere.

    >5: the wrong side is below; <2: above; the values 3 and 7 count both ways; of one row nothing is known; `>5` and
    `<2` of one molecule pull to the middle.
    """
    given = torch.tensor([[4.0], [6.0], [1.0], [5.0], [1.0], [9.0], [0.0], [3.5]], requires_grad=True)
    bounds = [[5, INF], [5, INF], [-INF, 2], [-INF, 2], [3, 3], [7, 7], [-INF, INF], [5, 2]]
    of_rows = torch.tensor(bounds, dtype=torch.float64)[:, None]
    batch = replace(targets_alone([[NAN]] * len(bounds)), bounds=of_rows)
    losses = batch_losses("regression", given, batch, None)
    assert losses.tolist() == [1, 0, 0, 9, 4, 4, INF, 1.5**2 + 1.5**2]
    torch.where(losses == math.inf, 0.0, losses).sum().backward()
    assert given.grad is not None
    assert given.grad[:, 0].tolist() == [-2, 0, 0, 6, -4, 4, 0, 0]


@pytest.mark.parametrize(
    ("loss", "targets"), [("binary", [[1, 0], [0, 1]]), ("classes", [[1], [0]]), ("regression", [[0, 5], [1, 4]])]
)
def test_the_losses_of_a_row_are_multiplied_by_its_weight(loss, targets):
    outputs, batch = torch.tensor(BINARY[:2]), targets_alone(targets)
    plain, weighted = (
        batch_losses(loss, outputs, one, None) for one in (batch, replace(batch, weights=torch.tensor([0.0, 3.0])))
    )
    factors = torch.tensor([0.0, 3.0]).repeat_interleave(len(plain) // 2)
    torch.testing.assert_close(weighted, plain * factors)


def test_spans_are_softmaxes_over_the_tokens_that_may_answer():
    logits = torch.tensor([[[0.0, math.log(2.0)], [LN3, math.log(4.0)], [9.0, 9.0]]])
    losses = batch_losses("span", logits, targets_alone([[1, 0]], [[True, True, False]]), None)
    assert losses.tolist() == pytest.approx([(LN_4_3 + LN3) / 2])


@pytest.mark.parametrize("loss", ["binary", "regression", "classes", "span"])
def test_what_is_left_out_has_gradient_zero_and_never_nan(loss):
    outputs: Tensor = torch.randn(2, 3, 2) if loss == "span" else torch.randn(2, 2)
    outputs.requires_grad_()
    answerable = [[True, True, False]] * 2 if loss == "span" else None
    targets = [[0.0, 1.0], [1.0, 1.0]] if loss == "span" else [[NAN, NAN], [1.0, NAN]]
    losses = batch_losses(loss, outputs, targets_alone(targets, answerable), None)
    torch.where(losses == math.inf, 0.0, losses).sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    left_out = outputs.grad[:, 2] if loss == "span" else outputs.grad[0]
    assert (left_out == 0).all()
