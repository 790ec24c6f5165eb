"""`train.compile`: a compiled model trains like an eager one; one that cannot be compiled is an error of one line."""

import functools
import shutil
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import cpu_vec_isa
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.distributed.parallel import compile_blocks
from exlm_cli.errors import ConfigError
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.train.pretrain import PretrainTask, run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import OUTPUT, SPECIAL, tiny_batch, tiny_recipe, train_losses


# the compiler warns inside itself of what it does to torch; elsewhere a warning is an error
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_run_has_the_losses_of_an_eager_one(tmp_path, monkeypatch):
    """Without dropout the two differ by rounding alone; the checkpoint has the same names either way.

    Packed sequences give microbatches without padding, so one graph is compiled. Its kernels are neither
    optimised nor vectorised, which takes half the time.
    """
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    losses: dict[bool, list[float]] = {}
    for is_compiled in (False, True):
        train: dict[str, Any] = {"compile": is_compiled, "log_every_steps": 1, "max_steps": 3}
        recipe = tiny_recipe(
            data={"bundled_rows": 300, "cache_dir": str(tmp_path / "cache"), "sample_break": "none"},
            masking={"mask_ratio": 0.5},
            model={"num_layers": 1, "dropout": 0.0, "attention_dropout": 0.0},
            train=train,
        )
        run = run_pretraining(recipe, out=tmp_path / f"compiled-{is_compiled}").run_dir
        losses[is_compiled] = train_losses(run)
        assert load_pretrained(run, device="cpu").step == 3
    assert len(losses[True]) == 3
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model", [{}, OUTPUT])
def test_blocks_compile_for_all_kinds_of_batches(monkeypatch, model):
    """Each kind has graphs of its own in training and in validation, more in all than torch's limit of 8."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    recipe = tiny_recipe(model={**model, "num_layers": 3})
    model = ExlmModel(recipe, SPECIAL.vocab_size)
    with torch._dynamo.config.patch(recompile_limit=8):
        _run_all_kinds(recipe, model)
    assert 8 < counter.frame_count < 40


def _run_all_kinds(recipe: PretrainRecipe, model: ExlmModel) -> None:
    compile_blocks(model)
    kinds = ((9, 9, 9), (9, 4, 12), (12, 12), (9,), (3, 3, 3))
    for batch in (tiny_batch(recipe, lengths) for lengths in kinds):
        model.train()
        model.node_states(batch).states.sum().backward()
        model.eval()
        with torch.no_grad():
            model.node_states(batch)


def test_a_model_that_cannot_be_compiled_is_one_line(tmp_path, monkeypatch):
    recipe = tiny_recipe(
        data={"bundled_rows": 300, "cache_dir": str(tmp_path / "cache")}, train={"compile": True, "max_steps": 3}
    )
    monkeypatch.setattr(PretrainTask, "losses", Mock(side_effect=InductorError(InvalidCxxCompiler(), None)))
    with pytest.raises(ConfigError, match=r"^the model could not be compiled: .+") as caught:
        run_pretraining(recipe, out=tmp_path / "run")
    assert "train.compile=false" in caught.value.hint
