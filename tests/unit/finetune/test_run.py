"""Fine-tuning of small tasks: it learns, scores the best epoch once, resumes bit by bit, refuses what it must."""

import csv
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, GridPoint
from exlm_cli.config.load import load_recipe
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.finetune import cell as cell_module
from exlm_cli.finetune.cell import Cell
from exlm_cli.finetune.model import load_finetuned, load_pretrained_weights
from exlm_cli.finetune.results import RunResults, read_predictions, read_results
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.finetune.trainer import encode_task, target_scale
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics, read_run_json
from tests.unit.finetune.synthetic import WordTask, cells, finetune_recipe, make_pretrained, run_tiny, weights


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pretrained(tmp_path_factory.mktemp("pretrained") / "run")


@pytest.fixture(scope="module")
def finished(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResults]:
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, run_tiny(pretrained, out).results


def test_a_run_directory_holds_all_that_is_promised(finished: tuple[Path, RunResults], pretrained: Path) -> None:
    run, results = finished
    names = {path.name for path in run.iterdir()}
    assert names == {
        "recipe.yaml", "encoder.yaml", "run.json", "tokenizer.json", "split.json", "results.json", "cells",
        "targets-valid.csv", "targets-test.csv", ".lock",
    }  # fmt: skip
    assert load_recipe(str(run / "recipe.yaml"), kind=FinetuneRecipe) == finetune_recipe()
    assert load_recipe(str(run / "encoder.yaml")) == load_recipe(str(pretrained / "recipe.yaml"))
    described = read_run_json(run)
    assert (described.command, described.task, described.seeds) == ("finetune", "words/binary", (1, 2))
    for seed in (1, 2):
        cell = run / f"cells/single/seed-{seed}"
        best = json.loads((cell / "result.json").read_text())["best_step"]
        assert {path.name for path in cell.iterdir()} == {
            "checkpoints", "metrics.jsonl", "result.json", "predictions-valid.csv", "predictions-test.csv",
        }  # fmt: skip
        assert [path.name for path in (cell / "checkpoints").iterdir()] == [f"best-{best}"]
    assert results == read_results(run)


def test_rows_left_out_are_all_listed_beside_the_results(pretrained: Path, tmp_path: Path) -> None:
    task = WordTask()
    task.skipped = tuple(SkippedRow("a.csv", str(n), f"a.csv:{n}", "C1, C", "no molecule") for n in range(2, 32))
    run = tmp_path / "run"
    recipe = finetune_recipe(seeds=[1], train={"max_epochs": 1})
    results = run_finetuning(recipe, checkpoint=pretrained, out=run, task=task).results
    assert results.notes[-1] == "rejected.csv lists all 30 rows that were left out, with their reasons"
    with (run / "rejected.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["file", "row", "reason", "text"]
    assert rows == [["a.csv", str(n), "no molecule", "C1, C"] for n in range(2, 32)]


def test_results_say_what_was_done_and_with_what(finished: tuple[Path, RunResults], pretrained: Path) -> None:
    run, results = finished
    assert results.init.as_json() == {
        "checkpoint": str(pretrained / "checkpoints/step-3"), "recipe": "tiny", "objective": "exlm", "steps": 3,
        "tokens": 3 * 8 * 12,  # three steps of eight sequences of ten tokens, [CLS] and [SEP]
        "num_states_per_mask": 3, "num_repeats": 1, "mask_ratio": 0.3,
    }  # fmt: skip
    assert results.parameters == sum(
        t.numel() for n, t in next(iter(weights(run).values())).items() if not n.startswith("output_")
    )
    expected = {
        "task": "words/binary", "kind": "finetune", "split": "random", "selection_metric": "accuracy",
        "aggregate": "mean", "seeds": [1, 2], "num_labels": 2, "notes": ["a note"], "grid_best": None, "grid": [],
        "split_sizes": {"train": 24, "valid": 12, "test": 12}, "is_greater_better": True,
    }  # fmt: skip
    assert {key: results.as_json()[key] for key in expected} == expected
    split = json.loads((run / "split.json").read_text())
    assert split["sha256"] == results.split_sha256
    assert split["indices"] == {k: v.tolist() for k, v in WordTask().split_indices.items()}
    for name in ("loss", "accuracy"):
        of_cells = [cell["metrics"]["test"][name] for cell in cells(run)]
        assert results.metrics["test"][name].values == tuple(of_cells)
        assert results.metrics["test"][name].mean == pytest.approx(np.mean(of_cells))
    for cell in cells(run):
        assert (cell["epochs"], cell["steps"], cell["grid"]) == (3, 9, {})
        assert cell["best_step"] == 3 * cell["best_epoch"]
        assert cell["tokens_per_s"] > 0
        assert 0 <= cell["outside_model_share"] < 1


def test_predictions_of_the_best_epoch_have_the_rows_of_the_input(finished: tuple[Path, RunResults]) -> None:
    run, _ = finished
    loaded = load_finetuned(run, device="cpu")
    assert (sorted(loaded.runners), loaded.sequence_length) == ([1, 2], 24)
    task = WordTask()
    for seed, runner in loaded.runners.items():
        encoded = task.encode("test", loaded.tokenizer, loaded.sequence_length)
        outputs = runner.predict(encoded, SilentProgress(), "test")
        with (run / f"cells/single/seed-{seed}/predictions-test.csv").open() as file:
            header, *rows = csv.reader(file)
        assert header == ["row", "amber", "birch"]
        assert [int(row[0]) for row in rows] == task.split_indices["test"].tolist()
        read = np.array([[float(cell) for cell in row[1:]] for row in rows])
        np.testing.assert_allclose(read, 1 / (1 + np.exp(-np.stack(outputs))), rtol=1e-6)
        written, names, targets = read_predictions(run / "targets-test.csv", "")
        assert (written, tuple(names)) == (task.split_indices["test"].tolist(), task.output_names)
        np.testing.assert_array_equal(targets, encoded.targets)
        result = json.loads((run / f"cells/single/seed-{seed}/result.json").read_text())
        assert task.score("test", outputs)["accuracy"] == result["metrics"]["test"]["accuracy"]


def test_the_best_epoch_is_the_best_of_the_curve_and_is_scored_once(pretrained: Path, tmp_path: Path) -> None:
    task = WordTask()
    run_tiny(pretrained, tmp_path / "run", task, seeds=[1], train={"max_epochs": 6})
    assert task.scored == ["valid"] * 7 + ["test"]
    rows = read_metrics(tmp_path / "run/cells/single/seed-1/metrics.jsonl")
    curve = [row["accuracy"] for row in rows if row["kind"] == "valid"]
    (cell,) = cells(tmp_path / "run")
    assert len(curve) == 6
    assert cell["best_epoch"] == 1 + int(np.argmax(curve))
    assert cell["metrics"]["valid"]["accuracy"] == max(curve)


def test_patience_stops_before_the_last_epoch(pretrained: Path, tmp_path: Path) -> None:
    class Unlucky(WordTask):
        def score(self, split: Any, outputs: Any) -> dict[str, float]:
            return {"accuracy": super().score(split, outputs)["accuracy"] * 0 + 1 / (1 + len(self.scored))}

    result = run_tiny(pretrained, tmp_path / "run", Unlucky(), seeds=[1], train={"max_epochs": 50, "patience": 2})
    assert (cells(tmp_path / "run")[0]["epochs"], result.results.best_epochs) == (3, (1,))


def test_scores_that_are_not_defined_are_null_and_the_last_epoch_is_taken(pretrained: Path, tmp_path: Path) -> None:
    class Undefined(WordTask):
        def score(self, split: Any, outputs: Any) -> dict[str, float]:
            return {"accuracy": math.nan}

    results = run_tiny(pretrained, tmp_path / "run", Undefined(), seeds=[1]).results
    assert results.metrics["test"]["accuracy"].values == (None,)
    assert results.best_epochs == (3,)
    json.loads((tmp_path / "run/results.json").read_text(), parse_constant=pytest.fail)


def test_rows_without_any_label_are_left_out_of_the_loss_and_counted(pretrained: Path, tmp_path: Path) -> None:
    class Masked(WordTask):
        def encode(self, split: Any, *args: Any) -> Any:
            encoded = super().encode(split, *args)
            encoded.targets[:4] = math.nan
            return encoded

    run_tiny(pretrained, tmp_path / "run", Masked(), seeds=[1], train={"max_epochs": 1})
    rows = read_metrics(tmp_path / "run/cells/single/seed-1/metrics.jsonl")
    assert [row["num_infeasible"] for row in rows if row["kind"] == "train"] == [4]


def test_regression_trains_on_standardised_targets_and_scores_in_units(pretrained: Path, tmp_path: Path) -> None:
    run_tiny(pretrained, tmp_path / "run", WordTask("regression"), seeds=[1])
    (saved,) = weights(tmp_path / "run").values()
    task = WordTask("regression")
    targets = task.encode("train", load_finetuned(tmp_path / "run", device="cpu").tokenizer, 24).targets
    assert saved["output_mean"].item() == pytest.approx(targets.mean())
    assert saved["output_std"].item() == pytest.approx(targets.std())
    first = read_metrics(tmp_path / "run/cells/single/seed-1/metrics.jsonl")[0]
    assert first["loss"] < 100  # of some standard deviations, not 100 squared


def test_the_scale_of_targets_leaves_out_what_is_missing() -> None:
    targets = np.array([[1.0, math.nan, 5.0], [3.0, math.nan, 5.0], [math.nan, math.nan, 5.0]])
    mean, std = target_scale(targets)
    assert mean.tolist() == [2, 0, 5]
    assert std.tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [0.1, -0.3, 1e17 / 3])
def test_the_scale_of_equal_targets_is_1_whatever_is_lost_in_rounding(value: float) -> None:
    mean, std = target_scale(np.array([[value]] * 3))
    assert std.tolist() == [1]
    assert mean[0] == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("unit", [1e-250, 1e-160, 1.0, 1e99])
def test_the_scale_of_targets_neither_overflows_nor_vanishes(unit: float) -> None:
    mean, std = target_scale(np.array([[1.0], [3.0]]) * unit)
    assert (mean[0], std[0]) == (pytest.approx(2 * unit, rel=1e-15), pytest.approx(unit, rel=1e-15))


def test_values_far_from_zero_are_learnt_like_others(pretrained: Path, tmp_path: Path) -> None:
    class Shifted(WordTask):
        def __init__(self, offset: float) -> None:
            super().__init__("regression")
            self.offset = offset

        def _target(self, row: int, words: list[str], ends: Any) -> list[float]:
            return [value + self.offset for value in super()._target(row, words, ends)]

    predicted = {}
    for offset in (0.0, 2.0**33):
        run = tmp_path / f"{offset:g}"
        run_tiny(pretrained, run, Shifted(offset), seeds=[1], train={"max_epochs": 2})
        predicted[offset] = read_predictions(run / "cells/single/seed-1/predictions-test.csv", "")[2] - offset
    assert np.ptp(predicted[0.0]) > 1e-3
    # float64 of 8.6e9 has steps of 2e-6; standardised targets differ by as much
    np.testing.assert_allclose(predicted[2.0**33], predicted[0.0], atol=1e-3)


def test_the_scale_of_targets_that_differ_in_the_last_digit_is_kept() -> None:
    assert target_scale(np.array([[1.0], [1.0 + 2**-50]]))[1].tolist() == [2**-51]


def test_from_scratch_takes_the_architecture_and_draws_the_weights_from_the_seed(
    pretrained: Path, tmp_path: Path, finished: tuple[Path, RunResults]
) -> None:
    results = run_tiny(pretrained, tmp_path / "run", init="scratch").results
    assert results.init.objective == "scratch"
    assert (results.init.checkpoint, results.init.steps, results.init.tokens) == (None, 0, 0)
    assert results.parameters == finished[1].parameters
    one, two = weights(tmp_path / "run").values()
    assert not torch.equal(one["token_embedding.weight"], two["token_embedding.weight"])


def test_a_finished_run_resumed_stays_as_it_is(
    tmp_path: Path, finished: tuple[Path, RunResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    monkeypatch.setattr(torch.optim.AdamW, "step", pytest.fail)
    result = run_finetuning(finetune_recipe(), checkpoint=None, resume=out, task=WordTask())
    assert result.results == finished[1]


def test_the_run_of_a_recipe_loads_the_task_it_names(pretrained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from exlm_cli.finetune import run as finetune

    monkeypatch.setattr(finetune, "load_task", lambda config, progress: WordTask())
    run_finetuning(finetune_recipe(seeds=[1]), checkpoint=pretrained, out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run/cells")
    moved = tmp_path / "moved"
    shutil.copytree(pretrained, moved)
    assert resume_finetuning(tmp_path / "run", checkpoint=moved).results.init.checkpoint == str(
        moved / "checkpoints/step-3"
    )


def test_the_baseline_is_scored_for_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    smiles = make_pretrained(tmp_path / "pre")
    recipe_file = smiles / "recipe.yaml"
    recipe_file.write_text(recipe_file.read_text().replace("kind: text", "kind: smiles"))
    task = WordTask()
    task.input_kind = "smiles"
    fake = types.ModuleType("exlm_cli.finetune.baseline")
    fake.score_baseline = lambda task, seed, progress: {"test": {"accuracy": seed / 10}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exlm_cli.finetune.baseline", fake)
    recipe = finetune_recipe(train={"max_epochs": 1})
    out = tmp_path / "run"
    results = run_finetuning(recipe, checkpoint=smiles, out=out, baseline=True, task=task).results
    assert results.baseline.metrics["test"]["accuracy"].values == (0.1, 0.2)
    (out / "results.json").unlink()
    again = run_finetuning(recipe, checkpoint=None, resume=out, task=task).results
    assert again == results


def refusal(error: type[Exception], act: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        act()
    return caught.value.message  # type: ignore[attr-defined,no-any-return]


def test_what_does_not_fit_the_checkpoint_is_refused_and_nothing_is_left(pretrained: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    step = pretrained / "checkpoints/step-3"
    molecules = WordTask()
    molecules.input_kind = "smiles"
    assert refusal(CheckpointError, lambda: run_tiny(pretrained, out, molecules)) == (
        f"{step} is a model of text; words/binary needs one of SMILES"
    )
    assert refusal(ConfigError, lambda: run_tiny(pretrained, out, sequence_length=65)) == (
        f"`task.sequence_length` 65 needs 65 positions; the model of {step} takes 64"
    )
    assert refusal(ConfigError, lambda: run_tiny(pretrained, out, train={"microbatch_tokens": 20})) == (
        "`train.microbatch_tokens` 20 does not hold one sequence of 24"
    )
    assert refusal(DataError, lambda: run_tiny(pretrained, out, WordTask(sizes=(20,)))) == (
        "words/binary: there are no rows to use as `valid`"
    )
    recipe = finetune_recipe()
    with_baseline = lambda: run_finetuning(  # noqa: E731
        recipe, checkpoint=pretrained, out=out, baseline=True, task=WordTask()
    )
    assert refusal(ConfigError, with_baseline) == "the baseline is for molecules; words/binary has text"
    assert refusal(ConfigError, lambda: run_finetuning(recipe, checkpoint=None)) == "no checkpoint to fine-tune"
    grid = lambda: run_finetuning(recipe, checkpoint=pretrained, out=out, use_grid=True)  # noqa: E731
    assert refusal(ConfigError, grid) == "tiny: the recipe has no `grid` to search"
    assert not out.exists()


def test_repeated_tokens_count_for_the_length(tmp_path: Path) -> None:
    repeated = make_pretrained(
        tmp_path / "pre", objective="mlm", masking={"num_repeats": 2, "scheme": "bernoulli"},
        model={"rope": "1d"}, train={"microbatch_tokens": 512},
    )  # fmt: skip
    assert refusal(ConfigError, lambda: run_tiny(repeated, tmp_path / "run", sequence_length=40)) == (
        f"`task.sequence_length` 40 with every token 2 times needs 78 positions; the model of "
        f"{repeated}/checkpoints/step-3 takes 64"
    )


def test_a_tokenizer_that_does_not_know_the_data_is_said_with_its_share(pretrained: Path, tmp_path: Path) -> None:
    class Strange(WordTask):
        def encode(self, split: Any, tokenizer: Any, sequence_length: int) -> Any:
            encoded = super().encode(split, tokenizer, sequence_length)
            for ids in encoded.token_ids:
                ids[1] = tokenizer.unk_id
            return encoded

    initial = load_pretrained_weights(pretrained, SilentProgress())
    data = encode_task(Strange(), initial.tokenizer, 24, 1)
    share = len(data.splits["train"]) / sum(len(ids) - 2 for ids in data.splits["train"].token_ids)
    assert data.unknown_share == pytest.approx(share)
    results = run_tiny(pretrained, tmp_path / "run", Strange(), seeds=[1], train={"max_epochs": 1}).results
    assert results.notes == (
        "a note",
        f"{100 * share:.1f} % of the training tokens are [UNK]: the tokenizer of {pretrained}/checkpoints/step-3 was "
        "not made for this data",
    )


def test_only_runs_that_fit_are_begun_with_or_gone_on_with(
    pretrained: Path, tmp_path: Path, finished: tuple[Path, RunResults]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    assert refusal(CheckpointError, lambda: run_tiny(run, tmp_path / "out")) == (
        f"{run}: a run of `exlm finetune`; fine-tuning begins with one of `exlm pretrain`"
    )
    assert refusal(CheckpointError, lambda: resume_finetuning(pretrained)) == (
        f"{pretrained}: a run of `exlm pretrain`, not of `exlm finetune`"
    )
    assert refusal(CheckpointError, lambda: resume_finetuning(tmp_path)) == (
        f"{tmp_path}: not a run directory: it has no recipe.yaml"
    )
    other = WordTask(seed=1)
    recipe = finetune_recipe()
    assert refusal(CheckpointError, lambda: run_finetuning(recipe, checkpoint=None, resume=run, task=other)) == (
        f"{run}: the data of words/binary is not the one this run began with"
    )
    changed = finetune_recipe(optim={"lr": 1e-4})
    assert refusal(CheckpointError, lambda: run_finetuning(changed, checkpoint=None, resume=run, task=WordTask())) == (
        f"{run}: the recipe is not the one this run began with: `optim.lr` was {recipe.optim.lr} and is 0.0001"
    )
    elsewhere = make_pretrained(tmp_path / "pre", model={"num_layers": 2})
    assert refusal(
        CheckpointError, lambda: run_finetuning(recipe, checkpoint=elsewhere, resume=run, task=WordTask())
    ) == (f"{run}: the checkpoint is not the one this run began with")


def test_a_seed_can_be_added_when_resuming(tmp_path: Path, pretrained: Path, finished: tuple[Path, RunResults]) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    more = finetune_recipe(seeds=[1, 2, 7])
    results = run_finetuning(more, checkpoint=None, resume=run, task=WordTask()).results
    values = results.metrics["test"]["accuracy"].values
    assert values[:2] == finished[1].metrics["test"]["accuracy"].values
    assert (len(values), results.seeds) == (3, (1, 2, 7))
    assert load_recipe(str(run / "recipe.yaml"), kind=FinetuneRecipe) == more
    assert read_run_json(run).seeds == (1, 2, 7)


def test_what_is_missing_or_damaged_in_a_finished_run_is_named(
    tmp_path: Path, finished: tuple[Path, RunResults]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    cell = run / "cells/single/seed-1"
    (best,) = (cell / "checkpoints").iterdir()
    model = best / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(bytes(content))
    assert refusal(CheckpointError, lambda: load_finetuned(run, device="cpu")).startswith(
        f"{best} is refused: model.safetensors was altered"
    )
    shutil.rmtree(best)
    assert refusal(CheckpointError, lambda: load_finetuned(run, device="cpu")) == f"{cell}: its weights were deleted"
    for content in ("{", "{}"):
        (cell / "result.json").write_text(content)
        read = Cell(GridPoint(NO_GRID, {}, finetune_recipe()), 1, cell).read
        assert refusal(CheckpointError, read).startswith(f"{cell / 'result.json'}: ")


def test_results_that_are_missing_or_altered_are_refused(tmp_path: Path, finished: tuple[Path, RunResults]) -> None:
    path = tmp_path / "results.json"
    whole = finished[1].as_json()
    for changes, key in (
        ({"seeds": None}, "`seeds`"),
        ({"metrics": {"test": {}}}, "`metrics.valid`"),
        ({"metrics": {"valid": {"accuracy": {}}}}, "`metrics.valid.accuracy.mean`"),
        ({"init": 3}, "`init`"),
        ({"of_another_version": 3}, "`of_another_version`"),
    ):
        path.write_text(json.dumps(whole | changes))
        message = refusal(CheckpointError, lambda: read_results(tmp_path))
        assert str(path) in message
        assert key in message
    path.write_text(json.dumps({key: value for key, value in whole.items() if key != "split_sha256"}))
    assert refusal(CheckpointError, lambda: read_results(tmp_path)) == f"{path}: `split_sha256` is missing"
    path.unlink()
    assert "is not finished" in refusal(CheckpointError, lambda: read_results(tmp_path))


def test_best_weights_altered_before_they_are_scored_are_refused(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_module, "verify_checkpoint", lambda path: "model.safetensors is missing")
    message = refusal(CheckpointError, lambda: run_tiny(pretrained, tmp_path / "run", train={"max_epochs": 1}))
    assert message.endswith("is refused: model.safetensors is missing")
