"""A tiny model must learn a tiny set by heart, with every objective and alignment."""

import math

import pytest
import torch

from exlm_cli.model.exlm import ExlmModel
from exlm_cli.train.objective import Objective
from exlm_cli.train.optim import build_optimizer
from tests.tiny import CHAIN, SPECIAL, tiny_batch, tiny_recipe


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": "mlm"},
        {},
        {"model": {"alignment": "independent"}},
        {"model": CHAIN},
        {"model": {"transition": {"start": "next_mask", "rope": "nodes", "balance": 0.1}}},
    ],
)
def test_a_batch_is_learnt_by_heart(sections):
    model = {"dropout": 0.0, "attention_dropout": 0.0, "width": 32, **sections.get("model", {})}
    recipe = tiny_recipe(**{**sections, "model": model}, optim={"lr": 3e-3})
    torch.manual_seed(0)
    model = ExlmModel(recipe, SPECIAL.vocab_size)
    if model.chain_head is not None:
        model.chain_head.begin_step(0.5, model.decoder_weight)
    objective = Objective(unk_id=4, num_repeats=1, backend="auto")
    optimizer = build_optimizer(model, recipe.optim)
    batch = tiny_batch(recipe, (9, 12, 7, 5))
    for _ in range(150):
        optimizer.zero_grad()
        loss = objective.sequence_nll(model, batch).mean()
        if loss.item() < 0.1 * math.log(SPECIAL.vocab_size):
            return
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is {loss.item()}")
