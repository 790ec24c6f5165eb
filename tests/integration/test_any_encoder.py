"""An ExLM from the encoder of transformers: trained, resumed to the bit, scored and used without its first folder."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from exlm_cli import load
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.export.intake import take_in
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_run_json
from exlm_cli.train.pretrain import resume_pretraining, run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from exlm_cli.train.task import Callback
from tests.foreign import AMINO_ACIDS, WORDS, save_masked_lm
from tests.recorder import Recorder
from tests.tiny import CHAIN, tiny_recipe, train_losses
from tests.unit.finetune.synthetic import finetune_recipe
from tests.unit.tasks.glue_files import write_glue

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_cache")  # what is taken in


def write_rows(path, family):
    rng = np.random.default_rng(0)
    alphabet, blank = (list(AMINO_ACIDS[:20]), "") if family == "esm" else (WORDS, " ")
    path.write_text("\n".join(blank.join(rng.choice(alphabet, rng.integers(6, 12))) for _ in range(120)))
    return str(path)


def recipe_for(tmp_path, family="bert", **sections):
    defaults = {
        "data": {"train": [write_rows(tmp_path / "rows.txt", family)]},
        "masking": {"mask_ratio": 0.387, "num_states_per_mask": 4},
        "model": {**CHAIN, "dropout": 0.1},
        "train": {"checkpoint_every_steps": 2, "log_every_steps": 1, "validation_sequences": 2, "num_threads": 1},
    }
    merged = {key: {**defaults.get(key, {}), **sections.get(key, {})} for key in defaults | sections}
    return tiny_recipe(**merged)


def take(tmp_path, family="bert", **changes):
    save_masked_lm(family, tmp_path / family, **changes)
    return take_in(f"hf:{tmp_path / family}", SilentProgress())


class Broken(Callback):
    """Ends a run after a step, as a fault of the machine would."""

    def __init__(self, step):
        self.step = step

    def on_step(self, step, loss):
        if step == self.step:
            raise OSError("power failure")


@pytest.mark.parametrize("family", ["bert", "esm"])
def test_a_broken_run_ends_like_an_undisturbed_one_without_the_folder(tmp_path, family):
    """The run directory is complete: with the folder and its copy gone, it is resumed to the same bits and read."""
    start, recipe = take(tmp_path, family), recipe_for(tmp_path, family)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = run_pretraining(recipe, out=whole, checkpoint=start)
    with pytest.raises(OSError, match="power failure"):
        run_pretraining(recipe, out=broken, checkpoint=start, callbacks=[Broken(5)])
    for folder in (tmp_path / family, start):
        shutil.rmtree(folder)
    resumed = resume_pretraining(broken)
    assert (resumed.steps, resumed.before, resumed.metrics) == (6, undisturbed.before, undisturbed.metrics)
    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(run / "checkpoints/step-6" / name) for run in (broken, whole))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert train_losses(broken) == train_losses(whole)
    found = load_pretrained(broken, device="cpu")
    assert found.recipe.model.backbone.family == family
    mask = found.tokenizer.special_tokens[3]
    text = f"M{mask}K[MASK]L" if family == "esm" else f"the {mask} sees the [MASK] ."
    inspected = load(broken, device="cpu").fill(text)
    assert np.isfinite(inspected.log_prob_exact)
    assert read_run_json(broken).checkpoint == str(start / "checkpoints" / "step-0")


def test_the_heads_learn_first(tmp_path):
    """Before `optim.encoder_starts_at` of the steps the encoder keeps every bit, with weight decay; then it moves."""
    start = take(tmp_path)
    before = load_file(start / "checkpoints/step-0/model.safetensors")
    optim = {"encoder_starts_at": 0.5, "weight_decay": 0.1, "warmup_steps": 0, "lr": 0.01}
    recipe = recipe_for(tmp_path, optim=optim, train={"checkpoint_every_steps": 3})
    run_pretraining(recipe, out=tmp_path / "run", checkpoint=start)
    frozen, moved = (load_file(tmp_path / f"run/checkpoints/step-{step}/model.safetensors") for step in (3, 6))
    for name, tensor in before.items():
        assert torch.equal(frozen[name], tensor) == name.startswith("encoder."), name
    assert not torch.equal(
        moved["encoder.base.embeddings.word_embeddings.weight"],
        frozen["encoder.base.embeddings.word_embeddings.weight"],
    )


def test_an_exlm_goes_on_with_its_own_weights(tmp_path):
    """A new schedule on old weights: all parts are taken over, and the first loss is the last one's neighbour. With
    another number of states the chain head alone is new; an MLM leaves out what it has not. The validation before
    the first step is the last one of the old weights, on the same masks.
    """
    recipe = recipe_for(tmp_path, model={"width": 24})
    ended = run_pretraining(recipe, out=tmp_path / "first")
    told = Recorder()
    zero = recipe_for(tmp_path, model={"width": 16}, optim={"warmup_steps": 0, "lr": 1e-12}, train={"max_steps": 1})
    begun = run_pretraining(zero, out=tmp_path / "on", checkpoint=tmp_path / "first", progress=told)
    assert ended.before is None
    assert begun.before == {"kind": "valid", "step": 0, **ended.metrics}
    assert any("`model.width` 24 instead of 16" in line for line in told.said)
    assert not any("new in this run" in line for line in told.said)
    first, on = (load_pretrained(tmp_path / name, device="cpu").model.state_dict() for name in ("first", "on"))
    assert all(torch.allclose(first[name], on[name], rtol=0, atol=1e-9) for name in first)
    with_3 = zero.changed({"masking.num_states_per_mask": 3})
    run_pretraining(with_3, out=tmp_path / "k3", checkpoint=tmp_path / "on", progress=told)
    assert "new in this run: the chain head" in told.said
    as_mlm = zero.changed({"objective": "mlm", "masking.num_states_per_mask": 1})
    run_pretraining(as_mlm, out=tmp_path / "mlm", checkpoint=tmp_path / "on" / "checkpoints" / "step-1")
    assert load_pretrained(tmp_path / "mlm", device="cpu").model.chain_head is None


def test_what_a_checkpoint_cannot_begin_is_refused(tmp_path):
    start, recipe = take(tmp_path), recipe_for(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.max_length` is 66, but `data\.sequence_length` 100"):
        run_pretraining(recipe_for(tmp_path, data={"sequence_length": 100}, model={"max_length": 200},
                                   train={"microbatch_tokens": 512}), checkpoint=start)  # fmt: skip
    smiles = tiny_recipe(data={"kind": "smiles"}, model=CHAIN)
    with pytest.raises(CheckpointError, match=r"is a model of text, and `data\.kind` is smiles"):
        run_pretraining(smiles, checkpoint=start)
    backbone = load_pretrained(start, device="cpu").recipe.model
    with pytest.raises(ConfigError, match="whose encoder comes with its weights"):
        run_pretraining(recipe.model_copy(update={"model": backbone}), out=tmp_path / "x")
    with pytest.raises(ValueError, match="reads no expanded masks"):
        PretrainRecipe.model_validate({**recipe.model_dump(), "model": {**backbone.model_dump(), "alignment": "dag"}})
    assert not (tmp_path / "x").exists()


def test_an_exlm_of_a_bert_is_fine_tuned_on_pairs(tmp_path):
    """With BERT's segments; the run is read again without the folders before it, and its vectors are finite."""
    start = take(tmp_path)
    run_pretraining(recipe_for(tmp_path), out=tmp_path / "exlm", checkpoint=start)
    write_glue(tmp_path / "data", "rte", copies=4)
    recipe = finetune_recipe(
        seeds=[1],
        task={"name": "glue/rte", "data_dir": str(tmp_path / "data"), "sequence_length": 48},
        train={"max_epochs": 1, "batch_sequences": 8, "microbatch_tokens": 4096},
    )
    result = run_finetuning(recipe, checkpoint=tmp_path / "exlm", out=tmp_path / "tuned")
    assert result.results.init.objective == "exlm"
    for folder in (start, tmp_path / "bert", tmp_path / "exlm"):
        shutil.rmtree(folder)
    run = load(tmp_path / "tuned", device="cpu")
    assert np.isfinite(run.predict([("the dog sees", "a cat")]).filter(like="_probability").to_numpy()).all()
    assert run.embed(["the dog sees"]).mean.shape == (1, 32)
