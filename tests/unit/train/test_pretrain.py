"""Wiring of a pre-training run: what it writes, what can be read back, and each way it can be refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.cost import estimate
from exlm_cli.cost.counts import recipe_step_flops, tokens_per_step
from exlm_cli.data.tokenizer import train_bpe
from exlm_cli.errors import CheckpointError
from exlm_cli.format import format_percent
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics, read_run_json, update_run_json
from exlm_cli.train.pretrain import resume_pretraining, run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from tests.recorder import Recorder
from tests.tiny import CHAIN, tiny_recipe


def _recipe(cache: Path, **sections: Any) -> PretrainRecipe:
    data = {"bundled_rows": 300, "cache_dir": str(cache), **sections.pop("data", {})}
    train = {"validate_every_steps": 3, "checkpoint_every_steps": 3, "log_every_steps": 1, **sections.pop("train", {})}
    return tiny_recipe(data=data, train=train, **sections)


def _losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def run_and_said(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    lines = Recorder()
    result = run_pretraining(_recipe(cache), out=tmp_path_factory.mktemp("run") / "run", progress=lines)
    return result.run_dir, lines.said


@pytest.fixture(scope="module")
def run(run_and_said: tuple[Path, list[str]]) -> Path:
    return run_and_said[0]


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": "mlm", "masking": {"num_repeats": 2, "scheme": "bernoulli"}, "train": {"validate_at": [1, 0.3]}},
        {"model": {"alignment": "sparse_dag", "rope": "1d", "learned_positions": True}},
        {"model": {"alignment": "independent"}, "train": {"precision": "bf16"}},
        {"model": CHAIN, "train": {"precision": "bf16"}},
        {"train": {"batch_sequences": None, "batch_tokens": 64}, "optim": {"schedule": "cosine", "clip_norm": 0.5}},
    ],
)
def test_variants_that_no_other_test_runs_train_and_validate(cache, tmp_path, sections):
    result = run_pretraining(_recipe(cache, **sections), out=tmp_path / "run")
    assert result.steps == 6
    assert np.isfinite(result.metrics["loss"])
    kinds = [row["kind"] for row in read_metrics(result.run_dir / "metrics.jsonl")]
    assert (kinds.count("train"), kinds.count("valid")) == (6, 2)


def test_each_validation_scores_fixed_numbers_of_masks_and_those_of_the_own_ratio_are_its_own(cache, tmp_path):
    """The masks of one ratio are the recipe's where it has that ratio; 13 tokens have 999 masks no more than 13."""
    recipe = _recipe(cache, train={"validate_at": [1, 999, 0.3]})
    rows = read_metrics(run_pretraining(recipe, out=tmp_path / "run").run_dir / "metrics.jsonl")
    further = [row for row in rows if row["kind"] == "valid_at"]
    assert [(row["step"], row["at"]) for row in further] == [(s, at) for s in (3, 6) for at in (1, 999, 0.3)]
    names = ("loss", "loss_given_length", "mask_accuracy", "num_sequences")
    assert all(set(row) == {"kind", "step", "at", *names} for row in further)
    for own, row in zip([row for row in rows if row["kind"] == "valid"], further[2::3], strict=True):
        assert {name: row[name] for name in names} == {name: own[name] for name in names}


def test_a_run_and_each_of_its_checkpoints_can_be_read(run):
    described = read_run_json(run)
    newest, older = load_pretrained(run, device="cpu"), load_pretrained(run / "checkpoints/step-3", device="cpu")
    assert (described.steps, newest.step, older.step) == (6, 6, 3)
    assert described.parameters == sum(p.numel() for p in newest.model.parameters())
    assert not newest.model.training
    assert not torch.equal(newest.model.decoder_weight, older.model.decoder_weight)


def test_a_run_says_where_its_dag_begins_and_where_it_collapses(cache, run_and_said, tmp_path):
    """The formula passes over masks at first; a start at the next mask has the share of `studies/own_mask.py`."""
    literal, said = run_and_said
    share = read_run_json(literal).own_mask_share
    assert share is not None
    assert share < 0.9
    assert any(format_percent(share) in line and "start=next_mask" in line for line in said)
    assert sum(line.startswith("warning: the DAG of step 3") for line in said) == 1
    centred = _recipe(cache, model={"transition": {"start": "next_mask", "rope": "nodes"}}, train={"max_steps": 2})
    assert (read_run_json(run_pretraining(centred, out=tmp_path / "centred").run_dir).own_mask_share or 0) > 0.99


def test_a_long_run_tells_its_cost_and_a_resumption_does_not(cache, tmp_path, monkeypatch):
    recipe = _recipe(cache, train={"max_steps": 2})
    lines, again = Recorder(), Recorder()
    monkeypatch.setattr(estimate, "LONG_RUN_FLOPS", 2 * recipe_step_flops(recipe).total)
    run = run_pretraining(recipe, out=tmp_path / "run", progress=lines).run_dir
    assert f"{2 * tokens_per_step(recipe)} tokens" in lines.said[0]
    resume_pretraining(run, progress=again)
    assert not [line for line in again.said if "FLOPs" in line]


def test_another_seed_gives_another_run(cache, run, tmp_path):
    assert _losses(run_pretraining(_recipe(cache, seed=2), out=tmp_path / "other").run_dir) != _losses(run)


def test_resuming_where_nothing_was_saved_starts_again_and_a_change_of_precision_is_told(run, copy):
    shutil.rmtree(copy / "checkpoints")
    assert read_run_json(copy).precision == "fp32"
    update_run_json(copy, {"precision": "bf16"})
    lines = Recorder()
    resume_pretraining(copy, progress=lines)
    assert f"{copy} has no checkpoint yet; starting from step 0" in lines.said
    assert any("bf16 until now" in line for line in lines.said)
    assert read_run_json(copy).precision == "fp32"
    assert _losses(copy) == _losses(run)


def test_a_run_that_ran_out_of_memory_goes_on_with_less(cache, tmp_path):
    """Without dropout the microbatch changes no more than the order of a sum."""
    recipe = _recipe(cache, model={"dropout": 0.0, "attention_dropout": 0.0})
    whole = run_pretraining(recipe, out=tmp_path / "run")
    shutil.rmtree(whole.run_dir / "checkpoints/step-6")
    less = ["train.microbatch_tokens=64", "train.alignment_backend=reference"]
    resumed = resume_pretraining(whole.run_dir, less)
    assert resumed.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)
    assert load_recipe(str(whole.run_dir / "recipe.yaml")).train.microbatch_tokens == 64


def _files(run: Path) -> dict[str, bytes | None]:
    return {p.relative_to(run).as_posix(): p.read_bytes() if p.is_file() else None for p in run.rglob("*")}


def _change_seed(run: Path) -> None:
    recipe = (run / "recipe.yaml").read_text()
    assert "\nseed: 1\n" in recipe
    (run / "recipe.yaml").write_text(recipe.replace("\nseed: 1\n", "\nseed: 2\n"))


def _empty_weights(run: Path) -> None:
    for step in (3, 6):
        (run / f"checkpoints/step-{step}/model.safetensors").write_bytes(b"")


REFUSED: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "another recipe": (lambda _: None, ["optim.lr=0.5"],
                       r"step-6: the recipe is not the one this run began with: `optim.lr` was \S+ and is 0.5$"),
    "a recipe changed beside its checkpoint": (
        _change_seed, [], r"/recipe.yaml: the recipe in it is not the one that .*step-6 was trained with$"),
    "no whole checkpoint": (_empty_weights, [], "none of its checkpoints can be trusted: step-6, step-3$"),
    "a damaged run.json": (lambda run: (run / "run.json").write_text("[]"), [], "/run.json: "),
    "damaged metrics": (lambda run: (run / "metrics.jsonl").write_text("[]\n"), [], "/metrics.jsonl: line 1 "),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "overrides", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_refused_resumption_leaves_every_file_as_it_was(copy, damage, overrides, reason):
    damage(copy)
    (copy / "checkpoints/.writing-step-9").mkdir()
    before = _files(copy)
    with pytest.raises(CheckpointError, match=reason) as caught:
        resume_pretraining(copy, ["train.validate_every_steps=2", *overrides])
    assert str(copy) in caught.value.message
    assert _files(copy) == before


def test_a_damaged_or_missing_step_is_refused_by_name(copy):
    (copy / "checkpoints/step-6/state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-6 is refused: state.json is missing$"):
        load_pretrained(copy / "checkpoints/step-6", device="cpu")
    with pytest.raises(CheckpointError, match=r"step-41: no such checkpoint$") as caught:
        load_pretrained(copy / "checkpoints/step-41", device="cpu")
    assert caught.value.hint == "checkpoints of the run: step-6, step-3"
    assert load_pretrained(copy, device="cpu").step == 3
    (copy / "checkpoints/step-3/state.json").unlink()
    with pytest.raises(CheckpointError, match=r"is refused: none of its checkpoints is intact$"):
        load_pretrained(copy, device="cpu")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError, match=r"is refused: it has no checkpoint yet$"):
        load_pretrained(copy, device="cpu")


@pytest.fixture
def beginning(tmp_path: Path) -> Path:
    """Return a run with a checkpoint of step 3 of 6, on 200 rows of a file and a skipped one, whose cache is lost."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "row {n} of many"}}\n' for n in range(200)) + "{}\n")
    data = {"train": [str(rows)], "column": "text", "on_invalid": "skip"}
    run = run_pretraining(_recipe(tmp_path / "cache", data=data), out=tmp_path / "whole").run_dir
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints/step-6")
    shutil.rmtree(tmp_path / "cache")
    return copy


def test_a_run_whose_cache_is_lost_and_whose_data_were_moved_goes_on_with_its_own_tokenizer(beginning, tmp_path):
    """The same bits at the end, and no tokenizer is trained."""
    update_run_json(beginning, {"num_ranks": 2})  # of an earlier process
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    progress = Recorder()
    resume_pretraining(
        beginning, [f"data.train=[{tmp_path}/moved.jsonl]", f"data.cache_dir={tmp_path}/other"], progress=progress
    )
    assert [bar.label for bar in progress.bars if "tokeni" in bar.label] == ["tokenising"]
    assert not (tmp_path / "other/tokenizers").exists()
    for name in ("tokenizer.json", "checkpoints/step-6/model.safetensors", "checkpoints/step-6/optimizer.safetensors"):
        assert (beginning / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    now, whole = (read_run_json(run) for run in (beginning, tmp_path / "whole"))
    assert (now.data_fingerprint, now.num_ranks) == (whole.data_fingerprint, None)
    assert load_recipe(beginning / "recipe.yaml").data.train == (str(tmp_path / "moved.jsonl"),)


def test_other_rows_or_another_tokenizer_are_refused_where_the_cache_is_lost(beginning, tmp_path):
    """None of the counts of other rows reach the run."""
    own, other, rows = beginning / "tokenizer.json", tmp_path / "other.json", tmp_path / "rows.jsonl"
    whole, before = rows.read_text(), _files(beginning)
    assert "rejected.csv" in before
    rows.write_text(whole + "[]\n" + '{"text": "another row of words"}\n')
    with pytest.raises(CheckpointError, match=r"step-3: the data fingerprint is not the one this run began with$"):
        resume_pretraining(beginning)
    rows.write_text(whole)
    train_bpe(["other words"] * 9, 270, 1, SilentProgress()).save(other)
    with pytest.raises(CheckpointError, match=r"step-3: the (data fingerprint|tokenizer) is not the one this run"):
        resume_pretraining(beginning, [f"tokenizer.path={other}"])
    assert _files(beginning) == before
    shutil.rmtree(tmp_path / "cache")
    shutil.copy(other, own)  # refused before rows are read
    with pytest.raises(CheckpointError, match=rf"^{own}: the tokenizer in it is not the one that .*step-3 was"):
        resume_pretraining(beginning)
    assert not (tmp_path / "cache").exists()
