"""A training step that never waits: on tensors without data.

Reading a value from a `meta` tensor raises. So a step that runs on them has no place where a device would have to be
waited for. `test_compile.py` does the same with compiled blocks.
"""

import importlib
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exlm_cli.config.finetune import FinetuneModelConfig
from exlm_cli.config.sections import BackboneConfig
from exlm_cli.finetune.cells.runner import collate, task_losses
from exlm_cli.model import exlm
from exlm_cli.model.backbones import FAMILIES, model_values, plain_config
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import TaskModel
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import MetricsLog
from exlm_cli.tasks.base import EncodedRows
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.objective import Objective
from exlm_cli.train.process import StopSignal
from tests.foreign import config_of
from tests.tiny import CHAIN, SPECIAL, tiny_batch, tiny_recipe
from tests.unit.model.test_exlm import VARIANTS

META = torch.device("meta")
SHAPES = {
    "even": (10, 10, 10),
    "padded": (9, 4, 12),
    "one sequence": (11,),
    "one mask each": (1, 1, 1),
    "one sequence with one mask": (1,),
}
"""Lengths of the sequences of a batch, for every class of shapes."""
FEW = [SHAPES["padded"], SHAPES["one sequence with one mask"]]
DROPOUT = {"model": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}}
CASES = [(DROPOUT, [*SHAPES.values()]), ({"model": CHAIN}, [*SHAPES.values()]), *((one, FEW) for one in VARIANTS[1:])]


def _model_of(sections):
    recipe = tiny_recipe(**sections)
    model = ExlmModel(recipe, SPECIAL.vocab_size).to(META)
    if model.chain_head is not None:
        model.chain_head.is_learning = True
    return model, Objective(4, 1, "native"), recipe


def _backward(losses):
    torch.where(losses != math.inf, losses, 0.0).sum().backward()


def _assert_all_have_gradients(model):
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def _after_steps(sections, shapes):
    """Return a model with the gradients of a step, after steps on a batch of each shape."""
    model, objective, recipe = _model_of(sections)
    for lengths in shapes:
        model.zero_grad()
        losses = objective.sequence_nll(model, tiny_batch(recipe, lengths).to(META))
        assert losses.shape == (len(lengths),)
        _backward(losses)
    return model


@pytest.mark.parametrize(("sections", "shapes"), CASES)
def test_a_step_runs_on_tensors_without_data(sections, shapes):
    _assert_all_have_gradients(_after_steps(sections, shapes))


def test_a_step_that_computes_logits_again_runs_on_tensors_without_data(monkeypatch):
    monkeypatch.setattr(exlm, "HEAD_CHUNK_ROWS", 7)
    _assert_all_have_gradients(_after_steps({}, [SHAPES["padded"]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_an_encoder_of_transformers_runs_on_tensors_without_data(family):
    """But for padded batches, of which transformers asks once a step whether anything is masked (`masking_utils`)."""
    pytest.importorskip("transformers")
    backbone = BackboneConfig(family=family, config=json.dumps(plain_config(family, config_of(family, 40).to_dict())))
    model = CHAIN | {"backbone": backbone, **model_values(backbone)}
    _after_steps({"model": model}, [SHAPES["even"], SHAPES["one sequence with one mask"]])


@pytest.mark.parametrize("sections", [{}, {"train": {"precision": "fp16"}}])
def test_steps_of_the_training_loop_run_on_tensors_without_data(sections, tmp_path, monkeypatch):
    """Accumulation, scaling, clipping, the fused update and the loss scale included; only a row reads a value."""
    # the fused kernel has an implementation without data, but the optimiser lists devices that have data
    checks = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(checks, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    model, objective, recipe = _model_of(sections)
    batches = [tiny_batch(recipe, lengths).to(META) for lengths in ((10, 10), (9, 4, 12))]
    task = SimpleNamespace(
        model=model,
        module=model,
        identity={"data fingerprint": "none"},
        plan=lambda epoch: np.split(np.arange(12), 4),
        begin_step=lambda share_done: None,
        microbatches=lambda indices, epoch: iter(batches),
        losses=lambda batch: objective.sequence_nll(model, batch),
        count_tokens=lambda batch: batch.num_tokens,
        count_flops=lambda batch: batch.flops,
    )
    loop = TrainingLoop(
        task,
        recipe.train,
        recipe.optim,
        seed=1,
        run=tmp_path,
        metrics=MetricsLog(tmp_path / "metrics.jsonl"),
        progress=SilentProgress(),
        resume_command="exlm pretrain --resume RUN",
    )
    for _ in range(2):
        loss = loop.advance(StopSignal())
        assert loss is not None
        assert loss.is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):
        loop.numbers.read(loop.state)


NAN = math.nan
TARGETS = {
    "binary": [[1, 0], [NAN, 1], [NAN, NAN]],
    "classes": [[1], [NAN], [0]],
    "regression": [[0.5, NAN], [NAN, NAN], [1.0, 2.0]],
    "span": [[0, 1], [1, 1], [0, 0]],
}
"""Targets of each kind of loss, to be repeated; some are missing."""
FINE_TUNINGS = [(loss, num_repeats) for loss in TARGETS for num_repeats in ((1, 3) if loss == "span" else (1,))]


def task_model(loss, num_repeats, num_layers=1):
    recipe = tiny_recipe(objective="mlm", masking={"num_repeats": num_repeats}, model={"num_layers": num_layers})
    torch.manual_seed(0)
    dropout = FinetuneModelConfig(dropout=0.1, attention_dropout=0.1, pooler_dropout=0.1)
    return TaskModel(recipe, dropout, SPECIAL.vocab_size, None if loss == "span" else 2)


def task_batch(loss, num_repeats, lengths):
    rows = tuple(np.array([SPECIAL.cls_id, *range(5, 5 + length), SPECIAL.sep_id]) for length in lengths)
    targets = np.array([TARGETS[loss][i % 3] for i in range(len(lengths))])
    answerable = tuple(np.arange(length + 2) <= length for length in lengths) if loss == "span" else None
    split = EncodedRows(rows, targets, answerable)
    return collate(split, np.arange(len(lengths)), num_repeats=num_repeats, pad_id=SPECIAL.pad_id)


@pytest.mark.parametrize(("loss", "num_repeats"), FINE_TUNINGS)
@pytest.mark.parametrize("lengths", [(4, 4, 4), (6, 2, 5), (4,), (1,)])
def test_a_step_of_fine_tuning_runs_on_tensors_without_data(loss, num_repeats, lengths):
    model = task_model(loss, num_repeats).to(META)
    weights = torch.ones(2, device=META) if loss in ("binary", "classes") else None
    batch = task_batch(loss, num_repeats, lengths).to(META)
    _backward(task_losses(model, batch, loss, weights))
    _assert_all_have_gradients(model)
