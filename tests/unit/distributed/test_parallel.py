"""Choice of how ranks share a model, and the ranks of one process, which answer at once."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from exlm_cli.config.sections import TrainConfig
from exlm_cli.distributed.parallel import MANY_PARAMETERS, choose_strategy, writes_shares
from exlm_cli.distributed.ranks import ALONE, Ranks
from exlm_cli.errors import DataError
from exlm_cli.launch import Launch

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
    assert ALONE.shared(3) == 3
    assert ALONE.largest([4, 5]) == [4, 5]
    assert ALONE.total(torch.tensor([0.5])).tolist() == [0.5]
    assert ALONE.first(lambda: "x") == ALONE.in_turn(lambda: "x") == "x"
    assert list(ALONE.in_step(iter("ab"), lambda: "spare")) == [("a", True, None), ("b", True, None)]


def test_one_process_raises_what_its_work_raises():
    with pytest.raises(DataError, match="no such file"):
        ALONE.together(Mock(side_effect=DataError("no such file", "give another")))
