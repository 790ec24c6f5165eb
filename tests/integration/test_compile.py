"""`train.compile`: a compiled model trains like an eager one; one that cannot be compiled is an error of one line."""

import shutil
from typing import Any
from unittest.mock import Mock

import pytest

from exlm_cli.errors import ConfigError
from exlm_cli.train.pretrain import PretrainTask, run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import tiny_recipe, train_losses


# the compiler warns inside itself of what it does to torch; elsewhere a warning is an error
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_run_has_the_losses_of_an_eager_one(tmp_path, monkeypatch):
    """Without dropout the two differ by rounding alone; the checkpoint has the same names either way.

    Packed sequences give microbatches without padding, so one graph is compiled. Its kernels are neither
    optimised nor vectorised, which takes half the time.
    """
    # not above: every worker of a test run reads this file, and the code generator takes seconds
    from torch._inductor import cpu_vec_isa

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


def test_a_model_that_cannot_be_compiled_is_one_line(tmp_path, monkeypatch):
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    recipe = tiny_recipe(
        data={"bundled_rows": 300, "cache_dir": str(tmp_path / "cache")}, train={"compile": True, "max_steps": 3}
    )
    monkeypatch.setattr(PretrainTask, "losses", Mock(side_effect=InductorError(InvalidCxxCompiler(), None)))
    with pytest.raises(ConfigError, match=r"^the model could not be compiled: .+") as caught:
        run_pretraining(recipe, out=tmp_path / "run")
    assert "train.compile=false" in caught.value.hint
