"""Fine-tuning of small tasks: it learns, scores the best epoch once, resumes bit by bit, refuses what it must."""

import csv
import json
import math
import shutil
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exlm_cli import bundled_models
from exlm_cli.config.load import load_recipe
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.data.tokenizer import train_bpe
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.finetune.baselines import baseline as baseline_module
from exlm_cli.finetune.cells import trainer as trainer_module
from exlm_cli.finetune.cells.model import choose_tokenizer, load_finetuned
from exlm_cli.finetune.cells.trainer import encode_task
from exlm_cli.finetune.results import RunResults, read_results
from exlm_cli.finetune.run import require_fitting_model, run_finetuning
from exlm_cli.finetune.scores import read_scores
from exlm_cli.model.encoder import Encoder
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics, read_run_json
from exlm_cli.train.pretrained import load_pretrained_weights
from tests.recorder import Recorder
from tests.tiny import tiny_recipe
from tests.unit.finetune.finetuned_runs import finetune, write_rows
from tests.unit.finetune.synthetic import (
    ONE_EPOCH,
    WORDS,
    WordTask,
    assert_same_run,
    cells,
    finetune_recipe,
    make_pretrained,
    read_part,
    run_tiny,
    weights,
    words_table,
)


@pytest.fixture(scope="module")
def finished(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResults]:
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, run_tiny(text_model, out).results


def test_a_run_says_what_was_done_and_with_what(finished, text_model):
    run, results = finished
    assert results == read_results(run)
    assert results.init.as_json() == {
        "checkpoint": str(text_model / "checkpoints/step-3"), "sha256": read_run_json(run).checkpoint_sha256,
        "recipe": "tiny", "objective": "exlm", "steps": 3,
        "tokens": 3 * 8 * 12,  # three steps of eight sequences of ten tokens, [CLS] and [SEP]
        "num_states_per_mask": 3, "num_repeats": 1, "mask_ratio": 0.3,
    }  # fmt: skip
    assert results.parameters == sum(
        t.numel() for n, t in next(iter(weights(run).values())).items() if not n.startswith("output_")
    )
    scores = read_scores(run)
    for name in ("loss", "accuracy"):
        of_cells = [cell["metrics"]["test"][name] for cell in cells(run)]
        assert scores.by_seed("test", name).value.tolist() == of_cells
    for cell in cells(run):
        assert (cell["epochs"], cell["steps"], cell["best_step"]) == (3, 9, 3 * cell["best_epoch"])


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
    task.score = lambda *_: {"accuracy": math.nan}  # type: ignore[method-assign]
    result = run_tiny(text_model, tmp_path / "run", task, seeds=[1])
    assert result.scores.seeds("test", "accuracy").num == 0
    assert "exlm,single,0,1,test,,accuracy,\n" in (tmp_path / "run/scores.csv").read_text()
    assert result.results.best_epochs == (3,)
    json.loads((tmp_path / "run/results.json").read_text(), parse_constant=pytest.fail)


def test_rows_left_out_without_labels_and_with_unknown_tokens_are_told(text_model, tmp_path):
    """Rows without a label are left out of the loss; the share of [UNK] is noted, as the tokenizer does not fit."""

    class Strange(WordTask):
        skipped = tuple(SkippedRow("a.csv", str(n), f"a.csv:{n}", "C1, \ud83d", "no molecule") for n in range(2, 32))

        def encode(self, split: Any, tokenizer: Any, sequence_length: int) -> Any:
            encoded = super().encode(split, tokenizer, sequence_length)
            encoded.targets[:4] = math.nan
            for ids in encoded.token_ids:
                ids[1] = tokenizer.unk_id
            return encoded

    run = tmp_path / "run"
    notes = run_tiny(text_model, run, Strange(), **ONE_EPOCH).results.notes
    rows = read_metrics(run / "cells/single/split-0/seed-1/metrics.jsonl")
    assert [row["num_infeasible"] for row in rows if row["kind"] == "train"] == [4]
    data = encode_task(Strange(), load_pretrained_weights(text_model, SilentProgress()).tokenizer, 24, 1)
    share = len(data.train) / sum(len(ids) - 2 for ids in data.train.token_ids)
    assert data.unknown_share == pytest.approx(share)
    assert notes[:2] == ("a note", "rejected.csv lists what was left out, 30 rows, with reasons")
    assert notes[2].startswith(f"{100 * share:.1f} %")
    with (run / "rejected.csv").open(encoding="utf-8", newline="") as file:
        header, *rejected = csv.reader(file)
    assert header == ["file", "row", "reason", "text"]
    assert rejected == [["a.csv", str(n), "no molecule", "C1, \\ud83d"] for n in range(2, 32)]


def test_values_are_learnt_in_units_of_their_spread_so_that_those_far_from_zero_are_like_others(text_model, tmp_path):
    predicted, values = {}, np.array([a.count("r") + 3.0 * b.count("e") for a in WORDS for b in WORDS])
    for base in (0.0, 2.0**33):
        rows = [[" ".join(words), f"{base + y}"] for words, y in zip(product(WORDS, WORDS), values, strict=True)]
        (folder := tmp_path / repr(base)).mkdir()
        table = write_rows(folder / "a.csv", ["text", "y"], rows)
        task = {"name": "csv", "files": {"train": str(table)}, "text_column": "text", "label_columns": ["y"]}
        run = finetune(folder, text_model, (1,), label_kind="regression", **task)
        predicted[base] = read_part(run, "test")[1][0] - base
        (saved,) = weights(run).values()
        targets = base + values[json.loads((run / "split.json").read_text())["indices"]["train"]]
        assert saved["output_mean"].item() == pytest.approx(targets.mean())
        assert saved["output_std"].item() == pytest.approx(targets.std())
    assert np.ptp(predicted[0.0]) > 1e-3
    # float64 of 8.6e9 has steps of 2e-6; standardised targets differ by as much
    np.testing.assert_allclose(predicted[2.0**33], predicted[0.0], atol=1e-3)


def test_from_scratch_takes_the_architecture_and_draws_the_weights_from_the_seed(text_model, tmp_path, finished):
    results = run_tiny(text_model, tmp_path / "run", init="scratch").results
    assert results.init.objective == "scratch"
    assert (results.init.checkpoint, results.init.steps, results.init.tokens) == (None, 0, 0)
    assert results.parameters == finished[1].parameters
    one, two = weights(tmp_path / "run").values()
    assert not torch.equal(one["encoder.token_embedding.weight"], two["encoder.token_embedding.weight"])


def test_a_resumed_run_trains_no_finished_cell_and_names_and_keeps_seeds_that_it_leaves_out(
    tmp_path, finished, monkeypatch
):
    out, progress = tmp_path / "run", Recorder()
    shutil.copytree(finished[0], out)
    monkeypatch.setattr(torch.optim.AdamW, "step", pytest.fail)
    recipe = finetune_recipe(seeds=[2])
    result = run_finetuning(recipe, checkpoint=None, resume=out, task=WordTask(), progress=progress)
    said = "the results leave out seed 1 of this run; to keep all, list them with `--seeds LIST`"
    assert progress.said[0] == said
    assert result.results.seeds == (2,)
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


def test_no_baseline_is_trained_unasked_where_it_takes_long(text_model, tmp_path, monkeypatch):
    monkeypatch.setitem(baseline_module.MAX_LABELLED_ROWS, "text", 10)
    recipe, progress = finetune_recipe(task=words_table(tmp_path), **ONE_EPOCH), Recorder()
    result = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run", baseline=None, progress=progress)
    assert result.scores.baselines == []
    assert any("`--baseline`" in said for said in progress.said)


def test_what_does_not_fit_is_refused_and_nothing_is_left(text_model, tmp_path, monkeypatch):
    absent: Any = None  # as Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, "wandb", absent)
    out, recipe = tmp_path / "out", finetune_recipe()
    grid = {"train.microbatch_tokens": [20, 128]}
    encoder = load_recipe("quickstart-text")
    for error, said, changed, arguments in (
        (ConfigError, "`train.microbatch_tokens` 20", finetune_recipe(grid=grid), {"use_grid": True}),
        (ConfigError, "`task` has one split", finetune_recipe(task=words_table(tmp_path), num_replicates=2), {}),
        (ConfigError, "names wandb, which is not installed", finetune_recipe(train={"report_to": "wandb"}), {}),
        (DataError, "`valid`", recipe, {"task": WordTask(sizes=(20,))}),
        (ConfigError, "no checkpoint", recipe, {"checkpoint": None}),
        (ConfigError, "no weights to begin with", recipe, {"checkpoint": None, "encoder": encoder}),
    ):
        with pytest.raises(error, match=said):
            run_finetuning(changed, **{"checkpoint": text_model, "out": out, "task": WordTask(), **arguments})
        assert not out.exists()


@pytest.mark.parametrize(("num_repeats", "length", "positions"), [(1, 65, 65), (2, 40, 78)])
def test_a_sequence_that_the_model_has_no_positions_for_is_refused(num_repeats, length, positions):
    encoder = tiny_recipe(
        objective="mlm", masking={"num_repeats": num_repeats, "scheme": "bernoulli"}, model={"rope": "1d"}
    )
    recipe = finetune_recipe(task={"sequence_length": length})
    with pytest.raises(ConfigError, match=rf"`task.sequence_length` {length} .*needs {positions} positions.* takes 64"):
        require_fitting_model(recipe, encoder, Path("run"), task=WordTask())


def test_only_a_run_that_fits_is_continued(tmp_path, finished):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    with pytest.raises(CheckpointError, match="a run of `exlm finetune`"):
        run_tiny(run, tmp_path / "out")
    elsewhere = make_pretrained(tmp_path / "pre", model={"num_layers": 2})
    recipe, before = finetune_recipe(), (run / "recipe.yaml").read_bytes()
    for said, changed, arguments in (
        ("the data of words is not", recipe, {"task": WordTask(seed=1)}),
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


def test_best_weights_altered_before_they_are_scored_are_refused(text_model, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "verify_checkpoint", lambda path: "model.safetensors is missing")
    with pytest.raises(CheckpointError, match=r"is refused: model\.safetensors is missing"):
        run_tiny(text_model, tmp_path / "run", **ONE_EPOCH)


def test_an_encoder_without_a_checkpoint_takes_its_own_tokenizer_else_that_of_the_bundled_model(
    text_model, tmp_path, monkeypatch
):
    shutil.copytree(text_model, tmp_path / "models/text")
    monkeypatch.setattr(bundled_models, "FOLDER", tmp_path / "models")
    encoder, progress = load_recipe("quickstart-text"), Recorder()
    found = choose_tokenizer(encoder, WordTask(), None, progress)
    assert found.to_json() == (text_model / "tokenizer.json").read_text()
    assert progress.said[0].startswith("tokenizer: that of bundled:text")
    own = train_bpe([" amber birch"], 270, 1, SilentProgress())
    own.save(tmp_path / "own.json")
    encoder = encoder.changed({"tokenizer.path": str(tmp_path / "own.json")})
    assert choose_tokenizer(encoder, WordTask(), None, progress).to_json() == own.to_json()


def test_a_frozen_encoder_keeps_its_weights_and_reads_each_row_once(text_model, tmp_path, monkeypatch):
    """For all seeds and epochs together, and for the models of all seeds in predictions."""
    num_read = Counter()
    encode = Encoder.forward

    def counted(self, token_ids, *args, **keywords):
        num_read["rows"] += len(token_ids)
        return encode(self, token_ids, *args, **keywords)

    monkeypatch.setattr(Encoder, "forward", counted)
    out, task = tmp_path / "run", WordTask()
    run_tiny(text_model, out, task, seeds=[1, 2], train={"max_epochs": 3, "freeze_encoder": True})
    num_rows = sum(map(len, task.split_indices.values()))
    assert num_read["rows"] == num_rows
    before = load_pretrained_weights(text_model, SilentProgress()).model.state_dict()
    for after in weights(out).values():
        assert all(torch.equal(after[name], before[name]) for name in after if name.startswith("encoder."))
    finetuned = load_finetuned(out, device="cpu")
    encoded = task.encode("test", finetuned.tokenizer, finetuned.sequence_length)
    together = finetuned.run_seeds(encoded, SilentProgress())
    assert num_read["rows"] == num_rows + len(encoded)
    for outputs, runner in zip(together, finetuned.runners.values(), strict=True):
        logits = np.stack(runner.predict(encoded, SilentProgress(), "again"))
        np.testing.assert_allclose(outputs, 1 / (1 + np.exp(-logits)), atol=1e-5)
        model = runner.model.train()
        assert (model.head.training, model.encoder.training) == (True, False)
    metrics = [cell["metrics"]["test"]["accuracy"] for cell in cells(out)]
    assert metrics == [encoded.score(outputs[None])["accuracy"] for outputs in together]
