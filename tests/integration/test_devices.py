"""Training, resuming, measuring and fine-tuning on each device and precision; the whole way, on tiny runs."""

import shutil
from pathlib import Path

import pytest
import torch

from exlm_cli.experiments.evaluate import measure_entropy
from exlm_cli.run_dir import read_metrics
from exlm_cli.train.pretrain import run_pretraining
from tests.tiny import tiny_recipe
from tests.unit.finetune.synthetic import WordTask, make_pretrained, run_tiny

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]
TRAIN = {"max_steps": 6, "checkpoint_every_steps": 3, "log_every_steps": 1, "validate_every_steps": 3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("alignment", ["dag", "sparse_dag", "independent"])
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
    assert _losses(tmp_path / "part") == pytest.approx(_losses(tmp_path / "whole"), rel=tolerance, abs=0)
    assert part.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=tolerance, abs=0)
    (measured,) = measure_entropy(tmp_path / "whole", mask_ratios=[0.5], device=device)
    assert measured.entropy_bits > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_is_fine_tuned(tmp_path, device):
    pretrained = make_pretrained(tmp_path / "pre", device=device)
    train = {"max_epochs": 2, "batch_sequences": 16, "microbatch_tokens": 4096}
    result = run_tiny(pretrained, tmp_path / "run", WordTask(), seeds=[1], train=train, device=device)
    assert 0 <= result.results.metrics["valid"]["accuracy"].mean <= 1


def _losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
