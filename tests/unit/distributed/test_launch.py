"""Launch of a process from torchrun's variables, and the mistakes of a launch by hand."""

import pytest

from exlm_cli.cli.app import main
from exlm_cli.distributed.launch import ONE_PROCESS, Launch, is_quiet, prints_error, read_launch
from exlm_cli.errors import ConfigError
from exlm_cli.train.pretrained import pick_device
from tests.cli.asserts import refusal_of
from tests.tiny import tiny_recipe

WHOLE = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**WHOLE, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "0", "RANK": "1", "LOCAL_RANK": "1"}])
def test_a_process_alone_needs_no_variable(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == ONE_PROCESS
    assert not is_quiet()
    assert prints_error(None)
    assert prints_error(3)


def test_a_rank_is_read_from_the_variables_of_torchrun(monkeypatch):
    _set(monkeypatch)
    assert read_launch() == Launch(rank=5, size=8, local_rank=1, local_size=4)


def test_an_incomplete_launch_is_refused(monkeypatch):
    _set(monkeypatch, RANK=None)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 8, .* RANK is not set") as caught:
        read_launch()
    assert "torchrun" in caught.value.hint


@pytest.mark.parametrize(
    ("rank", "local_rank", "reporter", "prints"),
    [("0", "0", 0, True), ("5", "1", 0, False), ("5", "1", 5, True), ("4", "0", None, True), ("5", "1", None, False)],
)
def test_one_rank_prints_an_error(monkeypatch, rank, local_rank, reporter, prints):
    """Rank 0, the survivor that is named, or before the ranks have met the first of each node."""
    _set(monkeypatch, RANK=rank, LOCAL_RANK=local_rank)
    assert prints_error(reporter) == prints
    assert is_quiet() == (rank != "0")


def test_other_commands_refuse_several_ranks_and_one_says_so(monkeypatch, capsys):
    _set(monkeypatch, RANK="0", LOCAL_RANK="0")
    words = ("finetune", "csv", "a.csv")
    assert "`exlm finetune` works in one process, but WORLD_SIZE is 8" in refusal_of(capsys, *words)
    _set(monkeypatch, RANK="1", LOCAL_RANK="1")
    assert main(words) == 2
    assert capsys.readouterr().err == ""


def test_each_rank_of_a_node_has_a_gpu(monkeypatch):
    """Two GPUs as torch would report them: the second rank takes the second; a third rank is refused, also on auto."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    recipe = tiny_recipe(device="auto")
    assert str(pick_device(recipe, Launch(3, 4, 1, 2))) == "cuda:1"
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="3 ranks were started on a node where torch sees 2 GPUs"):
            pick_device(tiny_recipe(device=device), Launch(2, 3, 2, 3))
    assert str(pick_device(tiny_recipe(device="cpu"), Launch(2, 3, 2, 3))) == "cpu"
