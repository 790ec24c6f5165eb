"""`train.compile`: how many graphs a recipe needs, that results are those without it, and a compiler that fails."""

import copy
import logging
import shutil
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.finetune.cells.runner import task_losses
from exlm_cli.model import compiled
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.train.objective import Objective
from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from tests.integration.test_no_host_waits import META, SHAPES, task_batch, task_model
from tests.tiny import SPECIAL, tiny_batch, tiny_recipe, train_losses

# the compiler warns inside itself of what it does to torch; elsewhere a warning is an error
pytestmark = pytest.mark.filterwarnings("default")

CLASSES = [*SHAPES.values(), (2, 7), (14, 14, 14), (5,) * 12]
"""And two padded sequences, as many tokens as a layer is wide, as many sequences as heads."""
SMALL = {"model": {"num_layers": 1}}


@pytest.fixture(autouse=True)
def _nothing_compiled_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")  # kernels that are not optimised take half the time
    torch._dynamo.reset()


@pytest.fixture
def counter(monkeypatch):
    """Counts graphs instead of generating their code."""
    # not above: every worker of a test run reads this file, and the tools of the compiler take seconds
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled, "compile_graph", counter)
    return counter


def _with_graphs(recipe):
    """Return a model twice, the first one compiled."""
    torch.manual_seed(0)
    model = ExlmModel(recipe, SPECIAL.vocab_size)
    model.encoder.gradient_checkpointing = recipe.train.gradient_checkpointing
    graphs = copy.deepcopy(model)
    graphs.encoder.compile_blocks()
    return graphs, model


def _trained(model, recipe, lengths):
    """The losses of a batch in training, and the gradients."""
    batch = tiny_batch(recipe, lengths)
    model.zero_grad()
    torch.manual_seed(0)
    losses = Objective(4, 1, "native").sequence_nll(model.train(), batch)
    losses.sum().backward()
    return [losses.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_three_graphs_train_a_recipe_and_three_validate_it_whatever_shape_a_batch_has(counter):
    """Not more within torch's limit of 8 for a function; on tensors without data, so that no graph waits for them."""
    recipe = load_recipe("text-base", kind=PretrainRecipe)
    width = 4 * recipe.model.num_heads
    sizes = {"model.width": width, "model.ffn_width": 2 * width, "model.num_layers": 2, "device": "cpu"}
    model = _with_graphs(recipe := recipe.changed(sizes))[0].to(META)
    batches = [tiny_batch(recipe, lengths).to(META) for lengths in CLASSES]
    for batch in batches:
        Objective(4, 1, "native").sequence_nll(model, batch).sum().backward()
    assert counter.frame_count == 3
    with torch.no_grad():
        for batch in batches:
            Objective(4, 1, "native").sequence_nll(model.eval(), batch)
    assert counter.frame_count == 6


def test_graphs_that_fine_tune_are_within_the_limit_whatever_shape_a_batch_has(counter, caplog):
    model = task_model("binary", 1, num_layers=2).to(META)
    model.encoder.compile_blocks()
    batches = [task_batch("binary", 1, lengths).to(META) for lengths in SHAPES.values()]
    for batch in batches:
        task_losses(model, batch, "binary", None).sum().backward()
    assert 0 < counter.frame_count <= 5
    with torch.no_grad():
        for batch in batches:
            task_losses(model.eval(), batch, "binary", None)
    assert counter.frame_count <= 10
    assert not [record for record in caplog.records if record.name == "exlm_cli"]


@pytest.mark.parametrize("sections", [{}, {"model": {"rope": "none", "learned_positions": True}}])
def test_losses_and_gradients_are_those_of_an_eager_step(sections, counter):
    recipe = tiny_recipe(**sections)
    graphs, model = _with_graphs(recipe)
    for lengths in ((9, 4, 12), (10, 10, 10), (1,)):
        torch.testing.assert_close(_trained(graphs, recipe, lengths), _trained(model, recipe, lengths))
    assert counter.frame_count == 3


def test_blocks_that_are_computed_again_draw_the_same_dropout(monkeypatch):
    from torch._dynamo.backends.registry import lookup_backend

    monkeypatch.setattr(compiled, "compile_graph", lookup_backend("aot_eager"))
    model = SMALL["model"] | {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
    results = []
    for is_lean in (False, True):
        recipe = tiny_recipe(model=model, train={"gradient_checkpointing": is_lean})
        results.append(_trained(_with_graphs(recipe)[0], recipe, (9, 4, 12)))
    for kept, again in zip(*results, strict=True):
        torch.testing.assert_close(kept, again, rtol=0, atol=0)


def _no_compiler():
    from torch._inductor import config

    return config.patch({"cpp.cxx": ("no-such-compiler",)})


@contextmanager
def _no_backward_pass():
    """A pass over graphs fails at those of a backward pass; kernels that are not vectorised take less time."""
    from torch._inductor import config, cpu_vec_isa

    def refuse(graph):
        if any("tangents" in node.name for node in graph.nodes):
            raise NotImplementedError("no backward pass")

    with config.patch(post_grad_custom_pre_pass=refuse), patch.object(cpu_vec_isa, "valid_vec_isa_list", list):
        yield


@pytest.mark.parametrize("broken", [_no_compiler, _no_backward_pass])
def test_any_error_of_the_compiler_is_one_line_and_training_goes_on_without(broken, caplog):
    """With the bits of an eager model."""
    recipe = tiny_recipe(**SMALL)
    graphs, model = _with_graphs(recipe)
    with broken():
        for lengths in ((9, 4, 12), (10, 10)):
            found, expected = _trained(graphs, recipe, lengths), _trained(model, recipe, lengths)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    told = ("exlm_cli", "torch._dynamo", "torch._inductor", "torch._functorch")
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (line,) = (record.getMessage() for record in warned if record.name.startswith(told))
    assert line.startswith("note: the model could not be compiled, and runs without: ")
    assert "\n" not in line


def test_a_compiled_run_has_the_losses_of_an_eager_one_and_its_checkpoint_is_read(tmp_path, counter):
    losses = {}
    for is_compiled in (False, True):
        train = {"compile": is_compiled, "log_every_steps": 1, "max_steps": 2}
        data = {"bundled_rows": 300, "cache_dir": str(tmp_path / "cache")}
        run = run_pretraining(tiny_recipe(**SMALL, data=data, train=train), out=tmp_path / f"{is_compiled}").run_dir
        losses[is_compiled] = train_losses(run)
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)
    assert counter.frame_count == 4
    assert load_pretrained(run, device="cpu").step == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_generated_code_gives_the_losses_and_gradients_of_an_eager_step(monkeypatch, caplog):
    """Its kernels are not vectorised, which takes half the time."""
    # not above: every worker of a test run reads this file, and the code generator takes seconds
    from torch._inductor import cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    recipe = tiny_recipe(model=SMALL["model"] | {"dropout": 0.0, "attention_dropout": 0.0})
    graphs, model = _with_graphs(recipe)
    for lengths in ((9, 4, 12), (11,)):
        torch.testing.assert_close(_trained(graphs, recipe, lengths), _trained(model, recipe, lengths))
    assert [record.getMessage() for record in caplog.records if record.name == "exlm_cli"] == []
