"""Ranks that do not meet are named; shares of ranks; the ranks of one process, which answer at once."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from exlm_cli.distributed import ranks as module
from exlm_cli.distributed.ranks import ALONE, Ranks, join
from exlm_cli.errors import DataError, RankError
from exlm_cli.launch import Launch, read_launch
from tests.ranks import launch_variables

CPU = torch.device("cpu")


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(("own", "missing", "reporter"), [(0, 1, 0), (1, 0, 1)])
def test_a_rank_that_does_not_start_in_time_is_named_by_the_lowest_that_did(monkeypatch, store, own, missing, reporter):
    monkeypatch.setattr(module, "MEET_LIMIT_S", 0.1)
    for name, value in launch_variables(own, 2, store.port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError) as caught, join(read_launch(), CPU):
        pass
    assert caught.value.message == f"rank {missing} of 2 did not start within 0 s, or has ended"
    assert caught.value.reporter == reporter


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
