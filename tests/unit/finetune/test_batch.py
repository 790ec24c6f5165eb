"""Batches of a task: repetition as in pre-training, padding, targets that stay with their rows."""

import numpy as np
import pytest
import torch

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data.masking import mask_sequence, sample_rng
from exlm_cli.finetune.batch import collate, repeated_lengths
from exlm_cli.tasks.base import EncodedSplit
from tests.tiny import SPECIAL

IDS = (np.array([1, 7, 8, 2]), np.array([1, 9, 2]), np.array([1, 2]))
SPLIT = EncodedSplit(IDS, np.array([[0.0, np.nan], [1.0, 2.0], [3.0, 4.0]]))


def test_rows_are_padded_and_keep_their_targets_and_their_place() -> None:
    batch = collate(SPLIT, np.array([1, 0]), num_repeats=1, pad_id=0)
    assert batch.token_ids.tolist() == [[1, 9, 2, 0], [1, 7, 8, 2]]
    assert batch.lengths.tolist() == [3, 4]
    assert batch.sample_index.tolist() == [1, 0]
    expected = torch.tensor([[1, 2], [0, float("nan")]], dtype=torch.float64)
    torch.testing.assert_close(batch.targets, expected, equal_nan=True)
    assert batch.answerable is None


@pytest.mark.parametrize("num_repeats", [1, 2, 4])
def test_tokens_are_repeated_as_pre_training_repeats_them(num_repeats: int) -> None:
    batch = collate(SPLIT, np.arange(3), num_repeats=num_repeats, pad_id=0)
    assert batch.lengths.tolist() == repeated_lengths(SPLIT, np.arange(3), num_repeats).tolist()
    masking = MaskingConfig(num_repeats=num_repeats)
    for row, ids in enumerate(IDS[:2]):
        masked = mask_sequence(ids[1:-1], masking, SPECIAL, sample_rng(0, 0, row))
        original = masked.input_ids.copy()
        original[masked.masked_positions] = masked.target_ids
        assert batch.token_ids[row, : batch.lengths[row]].tolist() == original.tolist()


def test_tokens_that_may_answer_stay_those_before_repetition() -> None:
    answerable = (np.array([True, True, True, False]), np.array([True, True, False]), np.array([True, False]))
    split = EncodedSplit(IDS, np.zeros((3, 2)), answerable)
    batch = collate(split, np.array([0, 1]), num_repeats=2, pad_id=0)
    assert batch.answerable is not None
    assert batch.answerable.tolist() == [[True, True, True, False], [True, True, False, False]]


def test_a_batch_goes_to_a_device_whole() -> None:
    batch = collate(SPLIT, np.array([0]), num_repeats=1, pad_id=0).to(torch.device("meta"))
    assert {t.device.type for t in batch.__dict__.values() if t is not None} == {"meta"}
