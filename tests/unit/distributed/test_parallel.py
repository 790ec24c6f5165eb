"""Choice of how ranks share a model, and the ranks of one process, which answer at once."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from exlm_cli.config.sections import TrainConfig
from exlm_cli.distributed.parallel import MANY_PARAMETERS, choose_strategy, spread, writes_shares
from exlm_cli.distributed.ranks import ALONE, Ranks
from exlm_cli.errors import DataError
from exlm_cli.launch import Launch
from exlm_cli.model import encoder
from tests.tiny import tiny_recipe

EIGHT = Ranks(Launch(2, 8, 2, 8, ("node0", 1)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("parallel", "parameters", "strategy"),
    [
        ("auto", MANY_PARAMETERS, "ddp"), ("auto", MANY_PARAMETERS + 1, "fsdp"),
        ("ddp", MANY_PARAMETERS + 1, "ddp"), ("fsdp", 1, "fsdp"),
    ],
)  # fmt: skip
def test_huge_models_are_shared_out(parallel, parameters, strategy):
    train = TrainConfig.model_validate({"parallel": parallel})
    assert choose_strategy(train, EIGHT, parameters) == strategy
    assert choose_strategy(train, ALONE, parameters) == "none"


def test_a_model_that_is_not_shared_has_no_shares_to_write():
    assert not writes_shares(nn.Linear(2, 2), TrainConfig.model_validate({"sharded_checkpoints": True}))


def test_shares_are_all_items_once():
    items = np.arange(11)
    shares = [Ranks(Launch(rank, 4), torch.device("cpu")).share_of(items) for rank in range(4)]
    assert sorted(np.concatenate(shares)) == list(range(11))
    assert {len(share) for share in shares} == {2, 3}


def test_one_process_answers_at_once():
    assert ALONE.exchange({"a": 1}) == [{"a": 1}]
    assert ALONE.total(torch.tensor([0.5])).tolist() == [0.5]
    assert ALONE.first(lambda: "x") == ALONE.in_turn(lambda: "x") == "x"
    assert list(ALONE.in_step(iter("ab"), lambda: "spare")) == [("a", True, None), ("b", True, None)]


def test_one_process_raises_what_its_work_raises():
    with pytest.raises(DataError, match="no such file"):
        ALONE.together(Mock(side_effect=DataError("no such file", "give another")))


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_blocks_in_16_bits_get_exact_rotations(group_of_one, monkeypatch):
    """FSDP rounds the real tensors that a block is given to 16 bits, in which 257 is 256.

    The expected angles are worked out in float64: pair p of a head of H entries turns by position * 10000^(-2p / H).
    """
    recipe = tiny_recipe(model={"rope": "1d"})
    position, width = torch.arange(400), recipe.model.width
    given = []
    monkeypatch.setattr(encoder, "rotate", lambda heads, rotation: given.append((heads, rotation)) or heads)
    model = spread(encoder.Encoder(recipe.model, 3), "fsdp", ALONE, torch.bfloat16)

    model(torch.zeros(1, len(position), width), torch.zeros(1, len(position), 2, dtype=torch.int64), None)

    heads, rotation = given[-1]
    exponents = torch.arange(0, heads.shape[-1], 2, dtype=torch.float64) / heads.shape[-1]
    expected = torch.exp(1j * position[:, None] * 10_000.0**-exponents)
    assert heads.dtype == torch.bfloat16
    torch.testing.assert_close(rotation[0, 0].to(expected.dtype), expected, atol=1e-4, rtol=0)
