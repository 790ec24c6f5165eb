"""Ranks that do not meet, and what the first one to fail leaves for the others in the store that all share."""

import pytest
import torch
import torch.distributed as dist

from exlm_cli.distributed import ranks as module
from exlm_cli.distributed.ranks import join
from exlm_cli.errors import RankError
from exlm_cli.launch import read_launch
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
