"""Ranks that do not meet, and the rank of one process, which answers at once."""

import socket
from unittest.mock import Mock

import pytest
import torch

from exlm_cli.distributed import ranks as module
from exlm_cli.distributed.launch import read_launch
from exlm_cli.distributed.ranks import ALONE, join
from exlm_cli.errors import DataError, RankError
from tests.ranks import launch_variables

CPU = torch.device("cpu")


@pytest.mark.parametrize(("own", "reason"), [(0, r"1/2 clients joined"), (1, r"127.0.0.1")])
def test_ranks_without_the_others_end_with_one_line_each(monkeypatch, own, reason):
    """Rank 0 keeps the store, on any port that is free; rank 1 finds none, for nothing listens at the port."""
    monkeypatch.setattr(module, "MEET_LIMIT_S", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        variables = launch_variables(own, 2, silent.getsockname()[1] if own else 0)
        for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).items():
            monkeypatch.setenv(name, value)
        said = rf"^rank {own} of 2 cannot meet the other ranks at 127\.0\.0\.1:\d+: [^\n]*{reason}[^\n]*$"
        with pytest.raises(RankError, match=said) as caught, join(read_launch(), CPU):
            pass
    assert caught.value.reporter == own


def test_one_process_answers_at_once_and_raises_what_its_work_raises():
    assert ALONE.all_gather_object({"a": 1}) == [{"a": 1}]
    assert ALONE.all_reduce_sum(torch.tensor([0.5])).tolist() == [0.5]
    assert ALONE.all_reduce_max(15) == 15
    assert ALONE.on_rank_0(lambda: "x") == ALONE.rank_0_first(lambda: "x") == "x"
    with pytest.raises(DataError, match="no such file"):
        ALONE.on_all_ranks(Mock(side_effect=DataError("no such file", "give another")))
