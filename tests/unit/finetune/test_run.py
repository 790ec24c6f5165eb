"""Fine-tuning of small tasks: it learns, scores the best epoch once, resumes bit by bit, refuses what it must."""

import csv
import json
import math
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exlm_cli import bundled_models
from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, GridPoint
from exlm_cli.config.load import load_recipe
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.data.tokenizer import train_bpe
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.finetune.baselines import baseline as baseline_module
from exlm_cli.finetune.cells import trainer as trainer_module
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.cells.trainer import Cell, encode_task
from exlm_cli.finetune.results import RunResults, read_results
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.finetune.scores import read_scores
from exlm_cli.model.encoder import Encoder
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics, read_run_json
from exlm_cli.tasks.metrics import score_rows
from exlm_cli.train.pretrained import load_pretrained_weights
from tests.recorder import Recorder
from tests.unit.finetune.synthetic import (
    ONE_EPOCH,
    WordTask,
    amines,
    assert_same_run,
    cells,
    finetune_recipe,
    grow_little,
    make_pretrained,
    read_part,
    run_tiny,
    weights,
    words_table,
)
from tests.unit.tasks.glue_files import write_glue


@pytest.fixture(scope="module")
def finished(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResults]:
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, run_tiny(text_model, out).results


def test_a_run_directory_holds_all_that_is_promised(finished, text_model):
    run, results = finished
    assert load_recipe(str(run / "recipe.yaml"), kind=FinetuneRecipe) == finetune_recipe()
    assert load_recipe(str(run / "encoder.yaml")) == load_recipe(str(text_model / "recipe.yaml"))

    for seed in (1, 2):
        cell = run / f"cells/single/split-0/seed-{seed}"
        best = json.loads((cell / "result.json").read_text())["best_step"]
        assert [path.name for path in (cell / "checkpoints").iterdir()] == [f"best-{best}"]
    assert results == read_results(run)


def test_rows_left_out_are_all_listed_beside_the_results(text_model, tmp_path):
    task = WordTask()
    task.skipped = tuple(SkippedRow("a.csv", str(n), f"a.csv:{n}", "C1, \ud83d", "no molecule") for n in range(2, 32))
    results = run_tiny(text_model, tmp_path / "run", task, **ONE_EPOCH).results
    assert results.notes[-2] == "rejected.csv lists what was left out, 30 rows, with reasons"
    with (tmp_path / "run/rejected.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["file", "row", "reason", "text"]
    assert rows == [["a.csv", str(n), "no molecule", "C1, \\ud83d"] for n in range(2, 32)]


def test_results_say_what_was_done_and_with_what(finished, text_model):
    run, results = finished
    assert results.init.as_json() == {
        "checkpoint": str(text_model / "checkpoints/step-3"), "sha256": read_run_json(run).checkpoint_sha256,
        "recipe": "tiny", "objective": "exlm", "steps": 3,
        "tokens": 3 * 8 * 12,  # three steps of eight sequences of ten tokens, [CLS] and [SEP]
        "num_states_per_mask": 3, "num_repeats": 1, "mask_ratio": 0.3,
    }  # fmt: skip
    assert results.parameters == sum(
        t.numel() for n, t in next(iter(weights(run).values())).items() if not n.startswith("output_")
    )

    split = json.loads((run / "split.json").read_text())
    assert split["sha256"] == results.split_sha256
    assert split["indices"] == {k: v.tolist() for k, v in WordTask().split_indices.items()}
    scores = read_scores(run)
    for name in ("loss", "accuracy"):
        of_cells = [cell["metrics"]["test"][name] for cell in cells(run)]
        assert scores.by_seed("test", name).value.tolist() == of_cells
        assert scores.seeds("test", name).mean == pytest.approx(np.mean(of_cells))
    for cell in cells(run):
        assert (cell["epochs"], cell["steps"], cell["best_step"]) == (3, 9, 3 * cell["best_epoch"])


def test_predictions_of_the_best_epoch_have_the_rows_of_the_input(finished):
    run, _ = finished
    loaded = load_finetuned(run, device="cpu")
    assert (sorted(loaded.runners), loaded.sequence_length) == ([1, 2], 24)
    task = WordTask()
    encoded = task.encode("test", loaded.tokenizer, loaded.sequence_length)
    test_rows = task.split_indices["test"].tolist()
    for seed, runner in loaded.runners.items():
        outputs = runner.predict(encoded, SilentProgress(), "test")
        rows, by_seed_KNC, targets = read_part(run, "test")
        written = by_seed_KNC[seed - 1]
        assert rows == test_rows
        np.testing.assert_array_equal(targets, encoded.targets)
        np.testing.assert_allclose(written, 1 / (1 + np.exp(-np.stack(outputs))), rtol=1e-6)
        result = json.loads((run / f"cells/single/split-0/seed-{seed}/result.json").read_text())
        assert task.score("test", list(written))["accuracy"] == result["metrics"]["test"]["accuracy"]


def test_the_best_epoch_is_the_best_of_the_curve_and_is_scored_once(text_model, tmp_path):
    task = WordTask()
    run_tiny(text_model, tmp_path / "run", task, seeds=[1], train={"max_epochs": 6})
    assert task.scored == ["valid"] * 7 + ["test", "valid", "test"]  # then the mean of the seeds, here of one
    rows = read_metrics(tmp_path / "run/cells/single/split-0/seed-1/metrics.jsonl")
    curve = [row["accuracy"] for row in rows if row["kind"] == "valid"]
    (cell,) = cells(tmp_path / "run")
    assert len(curve) == 6
    assert cell["best_epoch"] == 1 + int(np.argmax(curve))
    assert cell["metrics"]["valid"]["accuracy"] == max(curve)


def test_scores_that_are_not_defined_are_null_and_the_last_epoch_is_taken(text_model, tmp_path):
    task = WordTask()
    task.score = lambda split, outputs: {"accuracy": math.nan}  # type: ignore[method-assign]
    result = run_tiny(text_model, tmp_path / "run", task, seeds=[1])
    assert result.scores.seeds("test", "accuracy").num == 0
    assert "exlm,single,0,1,test,,accuracy,\n" in (tmp_path / "run/scores.csv").read_text()
    assert result.results.best_epochs == (3,)
    json.loads((tmp_path / "run/results.json").read_text(), parse_constant=pytest.fail)


def test_rows_without_any_label_and_unknown_tokens_are_counted(text_model, tmp_path):
    """Rows without a label are left out of the loss; the share of [UNK] is noted, as the tokenizer does not fit."""

    class Strange(WordTask):
        def encode(self, split: Any, tokenizer: Any, sequence_length: int) -> Any:
            encoded = super().encode(split, tokenizer, sequence_length)
            encoded.targets[:4] = math.nan
            for ids in encoded.token_ids:
                ids[1] = tokenizer.unk_id
            return encoded

    results = run_tiny(text_model, tmp_path / "run", Strange(), **ONE_EPOCH).results
    rows = read_metrics(tmp_path / "run/cells/single/split-0/seed-1/metrics.jsonl")
    assert [row["num_infeasible"] for row in rows if row["kind"] == "train"] == [4]
    data = encode_task(Strange(), load_pretrained_weights(text_model, SilentProgress()).tokenizer, 24, 1)
    share = len(data.train) / sum(len(ids) - 2 for ids in data.train.token_ids)
    assert data.unknown_share == pytest.approx(share)
    assert results.notes[0] == "a note"
    assert results.notes[1].startswith(f"{100 * share:.1f} %")


def test_values_are_learnt_in_units_of_their_spread_so_that_those_far_from_zero_are_like_others(text_model, tmp_path):
    predicted, task = {}, WordTask("regression")
    for base in (0.0, 2.0**33):
        task.base, run = base, tmp_path / f"{base:g}"
        run_tiny(text_model, run, task, seeds=[1], train={"max_epochs": 2})
        predicted[base] = read_part(run, "test")[1][0] - base
        (saved,) = weights(run).values()
        targets = task.targets["train"]
        assert (saved["output_mean"].item(), saved["output_std"].item()) == pytest.approx(
            (targets.mean(), targets.std())
        )
    assert np.ptp(predicted[0.0]) > 1e-3
    # float64 of 8.6e9 has steps of 2e-6; standardised targets differ by as much
    np.testing.assert_allclose(predicted[2.0**33], predicted[0.0], atol=1e-3)


def test_from_scratch_takes_the_architecture_and_draws_the_weights_from_the_seed(text_model, tmp_path, finished):
    results = run_tiny(text_model, tmp_path / "run", init="scratch").results
    assert results.init.objective == "scratch"
    assert (results.init.checkpoint, results.init.sha256) == (None, None)
    assert (results.init.steps, results.init.tokens) == (0, 0)
    assert results.parameters == finished[1].parameters
    one, two = weights(tmp_path / "run").values()
    assert not torch.equal(one["encoder.token_embedding.weight"], two["encoder.token_embedding.weight"])


def test_a_finished_run_resumed_stays_as_it_is(tmp_path, finished, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    monkeypatch.setattr(torch.optim.AdamW, "step", pytest.fail)
    result = run_finetuning(finetune_recipe(), checkpoint=None, resume=out, task=WordTask())
    assert result.results == finished[1]


def test_seeds_that_a_resumption_leaves_out_are_named_and_kept(tmp_path, finished):
    out, progress = tmp_path / "run", Recorder()
    shutil.copytree(finished[0], out)
    recipe = finetune_recipe(seeds=[2])
    result = run_finetuning(recipe, checkpoint=None, resume=out, task=WordTask(), progress=progress)
    said = "the results leave out seed 1 of this run; to keep all, list them with `--seeds LIST`"
    assert progress.said[0] == said
    whole = read_scores(finished[0])
    for name in ("loss", "accuracy"):
        assert result.scores.by_seed("test", name).value.tolist() == whole.by_seed("test", name).value.tolist()[1:]
    assert run_finetuning(finetune_recipe(), checkpoint=None, resume=out, task=WordTask()).results == finished[1]


def test_a_cell_killed_before_its_first_checkpoint_was_whole_begins_anew(tmp_path, finished):
    """Of its first process there are rows of the log, the best weights and a checkpoint that is half-written."""
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    cell = out / "cells/single/split-0/seed-2"
    (cell / "result.json").unlink()
    (best,) = (cell / "checkpoints").iterdir()
    best.rename(best.with_name("best-1"))
    (cell / "checkpoints/.writing-step-1").mkdir()
    run_finetuning(finetune_recipe(), checkpoint=None, resume=out, task=WordTask())
    assert_same_run(out, finished[0])
    assert [path.name for path in (cell / "checkpoints").iterdir()] == [best.name]


def test_a_resumed_run_names_the_weights_as_it_did_before_wherever_they_are(text_model, tmp_path, monkeypatch):
    monkeypatch.chdir(text_model.parent)
    run, recipe = tmp_path / "run", finetune_recipe(**ONE_EPOCH)
    before = run_finetuning(recipe, checkpoint=text_model.name, out=run, task=WordTask()).results.init
    shutil.rmtree(run / "cells")
    assert run_finetuning(recipe, checkpoint=None, resume=run, task=WordTask()).results.init == before
    shutil.copytree(text_model, tmp_path / "moved")
    after = run_finetuning(recipe, checkpoint=tmp_path / "moved", resume=run, task=WordTask()).results.init
    assert after.checkpoint == str(tmp_path / "moved/checkpoints/step-3")
    assert after.sha256 == before.sha256


def test_forests_are_scored_for_every_seed_and_kept(tmp_path, monkeypatch):
    grow_little(monkeypatch)
    smiles, task = amines(tmp_path)
    recipe, out = finetune_recipe(task=task, train={"max_epochs": 1}), tmp_path / "run"
    result = run_finetuning(recipe, checkpoint=smiles, out=out, baseline=None)
    scores = result.scores
    assert scores.baselines == ["forest-ecfp4", "forest-rdkit2d", "boosting"]
    for model in scores.baselines:
        assert scores.by_seed("test", "accuracy", model=model).seed.tolist() == ["1", "2"]
        _, predicted_KNC, targets_NC = read_part(out, "test", model)
        right = (predicted_KNC.mean(axis=0) >= 0.5) == targets_NC
        assert scores.average("test", "accuracy", model=model).mean == right.mean()
    assert result.results.comparison is not None
    (out / "results.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(baseline_module, "grow_forests", pytest.fail)
        patch.setattr(baseline_module, "grow_boosting", pytest.fail)
        again = resume_finetuning(out)
    assert again.results == result.results
    assert again.scores.table.equals(scores.table)
    other = resume_finetuning(out, ["seeds=[2,3]"]).scores
    assert other.by_seed("test", "accuracy", model="forest-ecfp4").seed.tolist() == ["2", "3"]


def test_no_forests_are_trained_unasked_where_they_take_hours(tmp_path, monkeypatch):
    monkeypatch.setitem(baseline_module.MAX_LABELLED_ROWS, "smiles", 10)
    (smiles, task), progress = amines(tmp_path), Recorder()
    recipe = finetune_recipe(task=task, **ONE_EPOCH)
    result = run_finetuning(recipe, checkpoint=smiles, out=tmp_path / "run", baseline=None, progress=progress)
    assert result.scores.baselines == []
    assert any("`--baseline`" in said for said in progress.said)


def test_the_mean_prediction_is_scored_as_the_mean_of_the_files(text_model, tmp_path):
    """By scikit-learn's formula on what the seeds wrote; that of one seed alone is its own."""
    recipe = finetune_recipe(task=words_table(tmp_path), seeds=[1, 2, 3], train={"max_epochs": 1})
    result = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run")
    for split in ("valid", "test"):
        _, by_seed_KNC, targets_NC = read_part(tmp_path / "run", split)
        wanted = score_rows("binary", by_seed_KNC.mean(axis=0), targets_NC)
        for name, value in wanted.items():
            assert result.scores.average(split, name).mean == pytest.approx(value, rel=1e-12)
    alone = resume_finetuning(tmp_path / "run", ["seeds=[2]"]).scores
    for name in wanted:
        assert alone.average("test", name).mean == pytest.approx(alone.seeds("test", name).mean, rel=1e-12)


def test_what_does_not_fit_is_refused_and_nothing_is_left(text_model, tmp_path, monkeypatch):
    absent: Any = None  # as Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, "wandb", absent)
    out, recipe = tmp_path / "out", finetune_recipe()
    grid = {"train.microbatch_tokens": [20, 128]}
    for error, said, changed, arguments in (
        (ConfigError, "`train.microbatch_tokens` 20", finetune_recipe(train={"microbatch_tokens": 20}), {}),
        (ConfigError, "`train.microbatch_tokens` 20", finetune_recipe(grid=grid), {"use_grid": True}),
        (ConfigError, "`task` has one split", finetune_recipe(task=words_table(tmp_path), num_replicates=2), {}),
        (ConfigError, "names wandb, which is not installed", finetune_recipe(train={"report_to": "wandb"}), {}),
        (DataError, "`valid`", recipe, {"task": WordTask(sizes=(20,))}),
        (ConfigError, "no checkpoint", recipe, {"checkpoint": None}),
    ):
        with pytest.raises(error, match=said):
            run_finetuning(changed, **{"checkpoint": text_model, "out": out, "task": WordTask(), **arguments})
        assert not out.exists()


@pytest.mark.parametrize(("num_repeats", "length", "positions"), [(1, 65, 65), (2, 40, 78)])
def test_a_sequence_that_the_model_has_no_positions_for_is_refused(tmp_path, num_repeats, length, positions):
    repeated = make_pretrained(
        tmp_path / "pre", objective="mlm", masking={"num_repeats": num_repeats, "scheme": "bernoulli"},
        model={"rope": "1d"}, train={"microbatch_tokens": 512},
    )  # fmt: skip
    recipe = finetune_recipe(task={"sequence_length": length})
    with pytest.raises(ConfigError, match=rf"`task.sequence_length` {length} .*needs {positions} positions.* takes 64"):
        run_finetuning(recipe, checkpoint=repeated, out=tmp_path / "run", task=WordTask())


class Moved(WordTask):
    """The same rows, one line further down in their file, as if a row that cannot be used were put before them."""

    @property
    def split_indices(self) -> Any:
        return {split: rows + 1 for split, rows in super().split_indices.items()}


def test_only_a_run_that_fits_is_continued(tmp_path, finished):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    with pytest.raises(CheckpointError, match="a run of `exlm finetune`"):
        run_tiny(run, tmp_path / "out")
    elsewhere = make_pretrained(tmp_path / "pre", model={"num_layers": 2})
    recipe, before = finetune_recipe(), (run / "recipe.yaml").read_bytes()
    for said, changed, arguments in (
        ("the data of words/binary is not", recipe, {"task": WordTask(seed=1)}),
        ("the data of words/binary is not", recipe, {"task": Moved()}),
        ("the recipe is not .* `optim.lr` was .* is 0.0001", finetune_recipe(optim={"lr": 1e-4}), {}),
        ("the recipe is not .* `aggregate`", finetune_recipe(aggregate="median"), {}),
        ("the checkpoint is not", recipe, {"checkpoint": elsewhere}),
    ):
        with pytest.raises(CheckpointError, match=said):
            run_finetuning(changed, resume=run, **{"checkpoint": None, "task": WordTask(), **arguments})
        assert (run / "recipe.yaml").read_bytes() == before


def test_what_is_missing_or_damaged_in_a_finished_run_is_named(tmp_path, finished):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    cell = run / "cells/single/split-0/seed-1"
    (best,) = (cell / "checkpoints").iterdir()
    model = best / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=f"{best} is refused: model.safetensors was altered"):
        load_finetuned(run, device="cpu")
    shutil.rmtree(best)
    with pytest.raises(CheckpointError, match=f"{cell} is refused: its weights were deleted") as caught:
        load_finetuned(run, device="cpu")
    assert str(cell / "result.json") in caught.value.hint
    (cell / "result.json").write_text("{}")
    with pytest.raises(CheckpointError, match=str(cell / "result.json")):
        Cell(run, GridPoint(NO_GRID, {}, finetune_recipe()), 1, "seed 1").read()


def test_best_weights_altered_before_they_are_scored_are_refused(text_model, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "verify_checkpoint", lambda path: "model.safetensors is missing")
    with pytest.raises(CheckpointError, match=r"is refused: model\.safetensors is missing"):
        run_tiny(text_model, tmp_path / "run", **ONE_EPOCH)


def test_only_the_matched_rows_of_mnli_have_the_interval(text_model, tmp_path):
    """Both development sets have each class six times."""
    write_glue(tmp_path, "mnli", copies=6)
    task = {"name": "glue/mnli", "data_dir": str(tmp_path), "sequence_length": 24}
    recipe = finetune_recipe(task=task, seeds=[1], train={"max_epochs": 1, "microbatch_tokens": 2048})
    results = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run").results
    assert results.split_sizes["valid"] == 36
    assert results.rows_interval is not None
    assert results.rows_interval.num == 18


def test_an_encoder_without_a_checkpoint_makes_its_tokenizer_of_the_training_rows(tmp_path):
    task = words_table(tmp_path)
    recipe = finetune_recipe(task=task, init="scratch", **ONE_EPOCH)
    encoder = load_recipe("quickstart-text", ["model.width=32", "model.num_layers=1", "tokenizer.vocab_size=280"])
    out = tmp_path / "run"
    first = run_finetuning(recipe, checkpoint=None, encoder=encoder, out=out).results
    assert (first.init.objective, first.init.checkpoint, first.init.recipe) == ("scratch", None, encoder.name)
    loaded = load_finetuned(out, device="cpu")
    assert loaded.tokenizer.vocab_size == 280
    (out / "results.json").unlink()
    assert resume_finetuning(out).results == first
    with pytest.raises(ConfigError, match="no weights to begin with"):
        run_finetuning(finetune_recipe(task=task), checkpoint=None, encoder=encoder, out=tmp_path / "no")


def test_an_encoder_without_a_checkpoint_takes_the_tokenizer_of_the_bundled_model(text_model, tmp_path, monkeypatch):
    shutil.copytree(text_model, tmp_path / "models/text")
    monkeypatch.setattr(bundled_models, "FOLDER", tmp_path / "models")
    recipe = finetune_recipe(task=words_table(tmp_path), init="scratch", **ONE_EPOCH)
    encoder = load_recipe("quickstart-text", ["model.width=32", "model.num_layers=1"])
    progress = Recorder()
    run_finetuning(recipe, checkpoint=None, encoder=encoder, out=tmp_path / "run", progress=progress)
    assert any(said.startswith("tokenizer: that of bundled:text") for said in progress.said)
    assert (tmp_path / "run/tokenizer.json").read_bytes() == (text_model / "tokenizer.json").read_bytes()
    own = tmp_path / "own.json"
    train_bpe([" amber birch"], 270, 1, SilentProgress()).save(own)
    encoder = encoder.changed({"tokenizer.path": str(own)})
    run_finetuning(recipe, checkpoint=None, encoder=encoder, out=tmp_path / "other")
    assert (tmp_path / "other/tokenizer.json").read_bytes() == own.read_bytes()


def test_a_frozen_encoder_keeps_the_weights_of_the_checkpoint(text_model, tmp_path):
    out = tmp_path / "run"
    run_tiny(text_model, out, seeds=[1], train={"max_epochs": 2, "freeze_encoder": True})
    before = load_pretrained_weights(text_model, SilentProgress()).model.state_dict()
    (after,) = weights(out).values()
    for name, tensor in after.items():
        if name.startswith("encoder."):
            assert torch.equal(tensor, before[name])
    model = load_finetuned(out, device="cpu").runners[1].model
    fresh = type(model)(load_recipe(str(out / "encoder.yaml")), finetune_recipe().model, 400, 2)
    fresh.freeze_encoder()
    fresh.train()
    assert (fresh.head.training, fresh.encoder.training) == (True, False)


def test_a_frozen_encoder_reads_each_row_once(text_model, tmp_path, monkeypatch):
    num_read = Counter()
    encode = Encoder.forward

    def counted(self, token_ids, *args, **keywords):
        num_read["rows"] += len(token_ids)
        return encode(self, token_ids, *args, **keywords)

    monkeypatch.setattr(Encoder, "forward", counted)
    out, task = tmp_path / "run", WordTask()
    run_tiny(text_model, out, task, seeds=[1, 2], train={"max_epochs": 3, "freeze_encoder": True})
    num_rows = sum(json.loads((out / "split.json").read_text())["sizes"].values())
    assert num_read["rows"] == num_rows
    finetuned = load_finetuned(out, device="cpu")
    encoded = task.encode("test", finetuned.tokenizer, finetuned.sequence_length)
    together = finetuned.run_seeds(encoded, SilentProgress())
    assert num_read["rows"] == num_rows + len(encoded)
    for outputs, runner in zip(together, finetuned.runners.values(), strict=True):
        logits = np.stack(runner.predict(encoded, SilentProgress(), "again"))
        np.testing.assert_allclose(outputs, 1 / (1 + np.exp(-logits)), atol=1e-5)
    metrics = [cell["metrics"]["test"]["accuracy"] for cell in cells(out)]
    assert metrics == [encoded.score(outputs[None])["accuracy"] for outputs in together]
