"""Logits of a run are read back as they were written, and refused where they are not these."""

import numpy as np
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.results import read_logits, write_logits


def test_logits_come_back_by_window_in_single_precision(tmp_path):
    windows = [np.arange(6.0).reshape(3, 2) / 3, np.full((1, 2), -7.0), np.ones((2, 2))]
    write_logits(tmp_path, windows)
    found = read_logits(tmp_path, [3, 1, 2])
    assert [window.dtype for window in found] == [np.float64] * 3
    for window, wanted in zip(found, windows, strict=True):
        np.testing.assert_array_equal(window, wanted.astype(np.float32))


def test_logits_that_are_altered_missing_or_of_other_windows_are_refused(tmp_path):
    cell = tmp_path / "cells" / "single" / "split-0" / "seed-1"
    cell.mkdir(parents=True)
    path, windows = cell / "logits-valid.npz", [np.ones((3, 2))]

    def refused(lengths: list[int], said: str) -> None:
        with pytest.raises(CheckpointError, match=rf"^{path}: {said}") as caught:
            read_logits(cell, lengths)
        assert caught.value.hint.endswith(f"`exlm finetune --resume {tmp_path}`")

    refused([3], "")
    write_logits(cell, windows)
    refused([3, 1], "not the logits of these 2 windows$")
    np.savez(path, logits=windows[0])  # float64
    refused([3], "not readable as logits: ")
    path.write_bytes(path.read_bytes()[:-1])
    refused([3], "not readable as logits: ")
