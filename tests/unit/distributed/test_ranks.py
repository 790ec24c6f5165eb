"""Waits for other ranks have an end, whose error names the rank that did not come; a store of one process is theirs."""

import pytest
import torch
import torch.distributed as dist

from exlm_cli.distributed import ranks as module
from exlm_cli.distributed.ranks import Ranks
from exlm_cli.errors import RankError
from exlm_cli.launch import Launch


def ranks_that_came(own: int, *came: int) -> Ranks:
    """Return what rank `own` of two sees when these have a heartbeat."""
    store = dist.HashStore()
    for rank in came:
        store.set(f"beat/{rank}", "1")
    return Ranks(Launch(own, 2, own, 2, ("node0", 1)), torch.device("cpu"), store)


@pytest.mark.parametrize(("own", "missing", "reporter"), [(0, 1, 0), (1, 0, 1)])
def test_a_rank_that_does_not_start_in_time_is_named_by_the_lowest_that_did(monkeypatch, own, missing, reporter):
    monkeypatch.setattr(module, "MEET_LIMIT_S", 0.1)
    with pytest.raises(RankError, match=rf"^rank {missing} of 2 did not start within 0 s, or has ended$") as caught:
        ranks_that_came(own, own).wait_to_start()
    assert caught.value.reporter == reporter


@pytest.mark.parametrize(("own", "awaited"), [(0, 1), (1, 0)])
def test_a_live_rank_that_does_not_answer_in_time_is_named(own, awaited):
    ranks = ranks_that_came(own, 0, 1)
    ranks.hint = "continue"
    with pytest.raises(RankError, match=rf"^rank {awaited} of 2 did not answer within 0 s$") as caught:
        ranks.exchange("mine", limit_s=0.1)
    assert (caught.value.hint, caught.value.reporter) == ("continue", own)
