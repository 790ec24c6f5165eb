"""Scores and entropy of a checkpoint: its own last validation, App. E token by token, a uniform model's log2 V."""

import math
from collections import defaultdict

import pytest
import torch

from exlm_cli.config.load import load_recipe
from exlm_cli.data.batch import expand
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.data.masking import Masker
from exlm_cli.errors import ConfigError
from exlm_cli.experiments.evaluate import evaluate_pretrained, measure_entropy
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics
from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.pretrain_task import VALIDATION_EPOCH
from exlm_cli.train.pretrained import load_pretrained
from tests.recorder import Recorder
from tests.tiny import CHAIN, sequences, tiny_recipe

REPEATED = {"num_repeats": 2, "scheme": "bernoulli", "mask_ratio": 0.6}


def _train(cache, out, **sections):
    data = {"bundled_rows": 300, "cache_dir": str(cache)}
    train = {"max_steps": 4, **sections.pop("train", {})}
    result = run_pretraining(tiny_recipe(data=data, train=train, **sections), out=out)
    return result.run_dir, result.metrics


@pytest.fixture(scope="module")
def repeated(cache, tmp_path_factory):
    model = {"init_std": 0.3, "rope": "none", "learned_positions": True}
    return _train(cache, tmp_path_factory.mktemp("run") / "run", objective="mlm", masking=REPEATED, model=model)


@pytest.fixture(scope="module")
def exlm(cache, tmp_path_factory):
    return _train(cache, tmp_path_factory.mktemp("run") / "run", model={"init_std": 0.3})


def _by_the_letter(run, ratio):
    """App. E, one token at a time: fully masked tokens, mean over copies, mean over tokens, in bits."""
    pretrained = load_pretrained(run, device="cpu")
    recipe = load_recipe(str(run / "recipe.yaml"), [f"masking.mask_ratio={ratio}"])
    data = prepare_data(recipe, progress=SilentProgress())
    k = recipe.masking.num_repeats
    token_entropies = []
    for index in range(len(data.valid)):
        masker = Masker(recipe.masking, data.tokenizer, recipe.seed, VALIDATION_EPOCH)
        masked = masker.mask(sequences([data.valid[index]], [index]))
        batch = expand(masked, 1, expands_input=False, pad_id=data.tokenizer.pad_id)
        with torch.no_grad():
            log_probs = pretrained.model.node_log_probs(pretrained.model.node_states(batch))[0, 1:-1].double()
        copies = defaultdict(list)
        for source, row in zip(masked.target_source.tolist(), log_probs, strict=True):
            copies[source].append(float(-(row.exp() * row).sum()) / math.log(2))
        token_entropies += [sum(bits) / k for bits in copies.values() if len(bits) == k]
    return sum(token_entropies) / len(token_entropies)


def test_repeated_mlm_has_the_entropy_of_app_e(repeated):
    """Where no token has all of its copies masked, it is not defined."""
    run, _ = repeated
    measured, without = measure_entropy(run, mask_ratios=[0.3, 1e-4], device="cpu")
    assert measured.metrics["entropy_bits"] == pytest.approx(_by_the_letter(run, 0.3), rel=1e-5)
    assert (measured.num_repeats, measured.num_states_per_mask, measured.mask_ratio) == (2, 1, 0.3)
    assert "entropy_posterior_bits" not in measured.metrics
    assert without.metrics["entropy_bits"] is None


def test_left_alone_both_repeat_the_run_s_own_validation(repeated, exlm):
    for (run, metrics), objective in ((repeated, "mlm"), (exlm, "exlm")):
        (measured,) = measure_entropy(run, device="cpu")
        score = evaluate_pretrained(run, "mine", device="cpu")
        assert {name: measured.metrics[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)
        assert {name: score.metrics[name] for name in metrics} == pytest.approx(metrics, rel=1e-6)
        assert (score.name, score.objective, score.step) == ("mine", objective, 4)
        assert ("effective_states" in score.metrics) == (objective == "exlm")


def test_a_checkpoint_is_scored_at_numbers_of_masks_that_are_given_or_of_its_recipe(cache, exlm, tmp_path):
    run, _ = _train(cache, tmp_path / "run", train={"validate_at": [2]})
    of_recipe = evaluate_pretrained(run, "mine", device="cpu").validated_at
    logged = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "valid_at"][-1]
    assert of_recipe == [pytest.approx({name: logged[name] for name in of_recipe[0]}, rel=1e-6)]
    score = evaluate_pretrained(exlm[0], "mine", validate_at=[1.0, 0.3], device="cpu")
    assert [row["at"] for row in score.validated_at] == [1, 0.3]
    own = {name: score.metrics[name] for name in ("loss", "loss_given_length", "mask_accuracy", "num_sequences")}
    assert score.validated_at[1] == pytest.approx({"at": 0.3, **own}, rel=1e-6)
    assert evaluate_pretrained(exlm[0], "mine", device="cpu").validated_at == []
    with pytest.raises(ConfigError, match=r"train\.validate_at"):
        evaluate_pretrained(exlm[0], "mine", validate_at=[1.5], device="cpu")


def test_a_uniform_model_has_log_v_bits_at_every_k_and_p(cache, tmp_path):
    """With 5 states a sequence is longer than a microbatch and than the positions that the run was trained with."""
    small = {"model": {"init_std": 1e-9, "max_length": 48}, "train": {"microbatch_tokens": 48}}
    run, _ = _train(cache, tmp_path / "run", optim={"lr": 1e-12}, **small)
    bits = math.log2(load_pretrained(run, device="cpu").tokenizer.vocab_size)
    results = measure_entropy(run, mask_ratios=[0.1, 0.6], ks=[1, 2, 5], device="cpu")
    assert [(r.num_states_per_mask, r.mask_ratio) for r in results] == [(k, p) for k in (1, 2, 5) for p in (0.1, 0.6)]
    for result in results:
        assert result.metrics["entropy_bits"] == pytest.approx(bits, rel=1e-5)
        assert result.metrics["entropy_posterior_bits"] == pytest.approx(bits, rel=1e-4)


def test_other_spellings_are_scored_apart_in_the_masks_and_figures_of_rows_of_their_own(cache, tmp_path):
    """Also by a model that has seen another number of spellings."""
    data = {"kind": "smiles", "train": ["bundled:molecules"], "sequence_length": 80, "bundled_rows": 60}
    spelled = data | {"num_spellings": 3, "cache_dir": str(cache)}
    model = {"init_std": 0.3, "max_length": 256}
    recipe = tiny_recipe(data=spelled, model=model, train={"max_steps": 2, "validate_every_steps": 1})
    result = run_pretraining(recipe, out=tmp_path / "run")
    prepared = prepare_data(recipe, progress=SilentProgress())
    metrics = {}
    for name, dataset in (("", prepared.valid), ("_spellings", prepared.spellings)):
        rows = [prepared.tokenizer.decode(dataset[index].tolist()) for index in range(len(dataset))]
        (tmp_path / f"rows{name}.smi").write_text("\n".join(rows) + "\n")
        overrides = ["data.num_spellings=1", "data.canonical_smiles=false"]
        score = evaluate_pretrained(
            result.run_dir, "mine", valid=[str(tmp_path / f"rows{name}.smi")], overrides=overrides, device="cpu"
        )
        metrics |= {f"{key}{name}": value for key, value in score.metrics.items()}
    found = [key for key in result.metrics if key.endswith("_spellings")]
    assert found == [f"{key}_spellings" for key in ("loss", "loss_given_length", "loss_independent", "mask_accuracy")]
    assert {key: metrics[key] for key in result.metrics} == pytest.approx(result.metrics, rel=1e-6)
    assert metrics["loss"] != metrics["loss_spellings"]
    overrides, valid = ["data.num_spellings=9"], [str(tmp_path / "rows.smi")]
    score = evaluate_pretrained(result.run_dir, "mine", valid=valid, overrides=overrides, device="cpu")
    assert {key: score.metrics[key] for key in result.metrics} == pytest.approx(result.metrics, rel=1e-6)


def test_maskings_that_a_model_cannot_take_are_refused(cache, repeated, tmp_path):
    with pytest.raises(ConfigError, match=r"`model\.max_length` is 64.* `masking\.num_repeats` 8"):
        measure_entropy(repeated[0], ks=[8], device="cpu")
    run, _ = _train(cache, tmp_path / "run", model=CHAIN)
    with pytest.raises(ConfigError, match=r"2 states per mask.* `model\.alignment: chain`"):
        measure_entropy(run, ks=[2], device="cpu")


def test_data_that_have_changed_are_told_and_given_ones_are_read_whole(tmp_path):
    own, given = tmp_path / "own #1.txt", tmp_path / "given.txt"
    own.write_text("".join(f"I am {n}\n" for n in range(60)))
    given.write_text("".join(f"to see {n}\n" for n in range(30)))
    data = {"train": [str(own)], "cache_dir": str(tmp_path / "cache"), "max_rows": 20, "sample_break": "line"}
    run = run_pretraining(tiny_recipe(data=data, train={"max_steps": 3}), out=tmp_path / "run #1").run_dir
    progress = Recorder()
    evaluate_pretrained(run, "mine", device="cpu", progress=progress)
    assert progress.said == [
        "`data.max_rows`: at most the first 20 rows of the training input", "scoring mine on 1 sequence",
    ]  # fmt: skip
    assert evaluate_pretrained(run, "mine", valid=[str(given)], device="cpu").metrics["num_sequences"] == 30
    own.write_text("We were here\n" * 60)
    evaluate_pretrained(run, "mine", device="cpu", progress=progress)
    assert any("its data have changed" in said for said in progress.said[2:])
