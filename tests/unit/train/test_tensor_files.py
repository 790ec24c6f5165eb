"""Tensors in shares: what any number of ranks wrote is read whole; a missing share is an error, never zeros."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exlm_cli.errors import CheckpointError
from exlm_cli.train.tensor_files import Rows, SavedTensors, shard_file


def _write_shares(folder: Path, whole: torch.Tensor, cuts: list[int]) -> list[tuple[Path, Rows | None]]:
    """Cut the rows of a tensor at these places, one file a piece; the first file also has a tensor without axes."""
    files: list[tuple[Path, Rows | None]] = []
    bounds = [0, *cuts, len(whole)]
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        path = folder / shard_file("model", index, len(bounds) - 1)
        tensors = {"w": whole[start:stop].contiguous()} | ({"step": torch.tensor(7.0)} if index == 0 else {})
        save_file(tensors, path)
        files.append((path, {"w": (start, len(whole))}))
    return files


@pytest.mark.parametrize("cuts", [[], [3], [2, 5], [1, 2, 6]])
def test_shares_come_back_whole(tmp_path, cuts):
    whole = torch.randn(7, 3)
    saved = SavedTensors(_write_shares(tmp_path, whole, cuts))
    assert saved.shapes == {"w": (7, 3), "step": ()}
    read, step = torch.zeros(7, 3), torch.zeros(())
    saved.copy_to("w", read)
    saved.copy_to("step", step)
    assert torch.equal(read, whole)
    assert float(step) == 7.0


@pytest.mark.parametrize(("lost", "first"), [(0, 0), (1, 2), (2, 5)])
def test_a_lost_share_is_an_error(tmp_path, lost, first):
    files = _write_shares(tmp_path, torch.randn(7, 3), [2, 5])
    del files[lost]
    with pytest.raises(CheckpointError, match=f"{tmp_path}: rows {first} to 7 of `w` are in no file"):
        SavedTensors(files).copy_to("w", torch.zeros(7, 3))


def test_tensors_of_another_shape_or_type_and_files_that_are_none_are_refused_by_file(tmp_path):
    saved = SavedTensors(_write_shares(tmp_path, torch.randn(7, 3), [3]))
    with pytest.raises(CheckpointError, match=r"`w` has shape \(7, 3\), the model needs \(7, 4\)$"):
        saved.copy_to("w", torch.zeros(7, 4))
    for name, target in (("w", torch.zeros(7, 3).double()), ("step", torch.zeros((), dtype=torch.int64))):
        with pytest.raises(CheckpointError, match=rf"`{name}` is torch.float32, the model needs {target.dtype}$"):
            saved.copy_to(name, target)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=rf"^{path}: the tensors cannot be read: "):
        SavedTensors([(path, None)])
