"""Training, resuming, measuring and fine-tuning on each device and precision; the whole way, on tiny runs."""

import shutil

import pytest
import torch

from exlm_cli.experiments.evaluate import measure_entropy
from exlm_cli.train.pretrain import run_pretraining
from tests.tiny import tiny_recipe, train_losses
from tests.unit.finetune.synthetic import make_pretrained, run_tiny

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TRAIN = {"max_steps": 6, "checkpoint_every_steps": 3, "log_every_steps": 1, "validate_every_steps": 3}


@pytest.mark.parametrize(
    ("device", "precision", "alignment"),
    [
        ("cpu", "fp16", "dag"),
        pytest.param("cuda", "fp32", "sparse_dag", marks=GPU),
        pytest.param("cuda", "bf16", "independent", marks=GPU),
        pytest.param("cuda", "fp16", "dag", marks=GPU),
    ],
)
def test_a_run_goes_on_from_a_checkpoint(tmp_path, device, precision, alignment):
    recipe = tiny_recipe(
        device=device,
        data={"bundled_rows": 300, "cache_dir": str(tmp_path / "cache")},
        model={"alignment": alignment, "dropout": 0.1},
        train=TRAIN | {"precision": precision},
    )
    whole = run_pretraining(recipe, out=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part/checkpoints/step-6")
    part = run_pretraining(recipe, resume=tmp_path / "part")
    # a device may add in another order
    tolerance = 0 if device == "cpu" else 1e-2
    assert train_losses(tmp_path / "part") == pytest.approx(train_losses(tmp_path / "whole"), rel=tolerance, abs=0)
    assert part.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=tolerance, abs=0)
    (measured,) = measure_entropy(tmp_path / "whole", mask_ratios=[0.5], device=device)
    assert measured.metrics["entropy_bits"] > 0


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_a_checkpoint_is_fine_tuned_as_on_the_cpu(tmp_path, device):
    """Without dropout, whose streams differ by device; precision is that of the device."""
    pretrained = make_pretrained(tmp_path / "pre")
    model = dict.fromkeys(("dropout", "attention_dropout", "pooler_dropout"), 0.0)
    train = {"max_epochs": 2, "batch_sequences": 16, "microbatch_tokens": 4096, "log_every_steps": 1}
    for name in ("cpu", device):
        run_tiny(pretrained, tmp_path / name, seeds=[1], model=model, train=train, device=name)
    theirs, mine = (train_losses(tmp_path / name / "cells/single/split-0/seed-1") for name in ("cpu", device))
    assert len(mine) == 4
    assert mine == pytest.approx(theirs, rel=1e-3)
