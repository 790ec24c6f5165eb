"""Checkpoints: written whole or not at all, and refused by name where cut or altered; `test_loop` has round trips."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from exlm_cli.config.sections import OptimConfig
from exlm_cli.errors import CheckpointError
from exlm_cli.files import read_json
from exlm_cli.train import checkpoint as ckpt
from exlm_cli.train.optim import build_optimizer


def _trained() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    for _ in range(3):
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _state(step: int) -> ckpt.CheckpointState:
    loop = ckpt.LoopState()
    loop.step = step
    return ckpt.CheckpointState(loop=loop, identity={"recipe": "ab"}, validation={"loss": 0.1, "score": None})


def _save_best(run: Path, step: int, value: float) -> Path:
    state = ckpt.BestState(step=step, epoch=1, value=value, identity={})
    final = run / f"checkpoints/best-{step}"
    return ckpt.save_weights(final, _trained()[0], state, resume_command="exlm finetune --resume RUN")


def _save(run: Path, step: int, keep_last: int = 5) -> Path:
    return ckpt.save_checkpoint(run, step, *_trained(), _state(step), keep_last=keep_last, resume_command="")


def test_only_the_newest_are_kept(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for step in (1, 2, 9, 10):
        path = _save(tmp_path, step, keep_last=2)
        if step == 1:  # moved to another disk
            path.rename(elsewhere)
            path.symlink_to(elsewhere)
    assert elsewhere.is_dir()
    assert [p.name for p in ckpt.checkpoint_paths(tmp_path)] == ["step-10", "step-9"]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_what_was_just_written_stays_whatever_lies_beyond_it(tmp_path):
    """A run whose step 200 was refused goes on from step 10, and keeps as many of its own as it was told."""
    for step in (10, 200):
        _save(tmp_path, step)
    _truncate(tmp_path / "checkpoints/step-200" / ckpt.MODEL_FILE)
    path = _save(tmp_path, 20, keep_last=1)
    assert ckpt.newest_good_checkpoint(tmp_path, lambda _: None) == path
    assert [p.name for p in ckpt.checkpoint_paths(tmp_path)] == ["step-200", "step-20"]
    written_ns = (path / ckpt.STATE_FILE).stat().st_mtime_ns
    assert (_save(tmp_path, 20, keep_last=1) / ckpt.STATE_FILE).stat().st_mtime_ns == written_ns  # it is whole
    assert ckpt.verify_checkpoint(_save(tmp_path, 200, keep_last=1)) is None


def _change_list(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(manifest: Path) -> None:
        content = json.loads(manifest.read_bytes())
        change(content["files"])
        manifest.write_text(json.dumps(content))

    return damage


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (ckpt.MODEL_FILE, _truncate),
        (ckpt.OPTIMIZER_FILE, _flip_a_bit),
        (ckpt.STATE_FILE, Path.unlink),
        (ckpt.MANIFEST_FILE, lambda path: path.write_text('{"step": 1, "files": {"a": {}}}')),
        (ckpt.MANIFEST_FILE, _change_list(lambda files: files.pop(ckpt.MODEL_FILE))),
        (ckpt.MANIFEST_FILE, _change_list(lambda files: files.update({"notes.txt": files[ckpt.STATE_FILE]}))),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(tmp_path, name, damage):
    older, newer = _save(tmp_path, 1), _save(tmp_path, 2)
    damage(newer / name)
    said: list[str] = []
    assert ckpt.newest_good_checkpoint(tmp_path, said.append) == older
    (line,) = said
    assert all(words in line for words in (str(newer), name))


def test_only_the_best_weights_and_a_pushed_step_lack_the_optimizer(tmp_path):
    pushed = _save(tmp_path, 1)
    _change_list(lambda files: files.pop(ckpt.OPTIMIZER_FILE))(pushed / ckpt.MANIFEST_FILE)
    assert ckpt.verify_checkpoint(pushed) is None
    best = _save(tmp_path, 2).rename(pushed.with_name("best-2"))
    assert (ckpt.verify_checkpoint(best) or "").startswith("manifest.json ")


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    _save(tmp_path, 1)
    monkeypatch.setattr(ckpt, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"step-2: the checkpoint could not be written: .*No space left"):
        _save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="best-4") as caught:
        _save_best(tmp_path, 4, 0.1)
    assert "`exlm finetune --resume RUN`" in caught.value.hint
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_moments_of_other_parameters_or_of_another_optimizer_are_refused_by_name(tmp_path):
    model, optimizer = _trained()
    path = _save(tmp_path, 1)
    smaller = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(CheckpointError, match=r"the optimizer's state of `1\.bias` is not one of AdamW for this model"):
        ckpt.load_optimizer_state(path, smaller, build_optimizer(smaller, OptimConfig(lr=0.1)))
    del optimizer.state[model[0].weight]["exp_avg_sq"]
    path = ckpt.save_checkpoint(tmp_path, 2, model, optimizer, _state(2), keep_last=1, resume_command="")
    with pytest.raises(CheckpointError, match=r"the optimizer's state of `0\.weight` is not one of AdamW"):
        ckpt.load_optimizer_state(path, model, optimizer)


def test_weights_of_another_shape_or_that_are_not_finite_are_refused_by_name(tmp_path):
    model, optimizer = _trained()
    with torch.no_grad():
        model[1].bias[1] = math.nan
    path = ckpt.save_checkpoint(tmp_path, 1, model, optimizer, _state(1), keep_last=1, resume_command="")
    with pytest.raises(CheckpointError, match=r"model.safetensors: `1.bias` holds values that are not finite"):
        ckpt.load_model_weights(path, model)
    other = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    message = r"`0.weight` is torch.float32 of shape \(3, 4\), in the recipe's model torch.float32 of shape \(3, 5\)"
    with pytest.raises(CheckpointError, match=message):
        ckpt.load_model_weights(path, other)


def test_the_best_weights_are_kept_without_an_optimizer_and_replaced_when_written_again(tmp_path):
    for value in (0.5, 0.7):
        path = _save_best(tmp_path, 4, value)
    assert ckpt.verify_checkpoint(path) is None
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "model.safetensors", "state.json"]
    assert read_json(path / ckpt.STATE_FILE, ckpt.BestState).value == 0.7
    assert ckpt.checkpoint_paths(tmp_path) == []
    _save_best(tmp_path, 10, 0.1)
    assert [p.name for p in ckpt.best_paths(tmp_path)] == ["best-10", "best-4"]
