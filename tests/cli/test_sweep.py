"""`exlm sweep`: its files, what scripts read, resuming; `exlm eval` of sweeps. Its errors are in golden/sweep.txt."""

import json
from pathlib import Path

import pytest

from exlm_cli.cli.app import main
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.experiments.results import Divergence
from exlm_cli.files import write_json
from exlm_cli.run_dir import read_run_json, update_run_json
from tests.cli.asserts import printed_by, refusal_of
from tests.cli.conftest import TINY as TINY_VALUES
from tests.unit.finetune.finetuned_runs import read_rows
from tests.unit.report.results import sweep_results, write_cell

SETS = [f"pretrain.{value}" for value in TINY_VALUES if not value.startswith("device=")]
SETS += ["measure_sequences=8", "variants.mlm-plus-plus={train.max_steps: 8}"]
COMMAND = ["sweep", "quickstart-ablations", *(word for value in SETS for word in ("--set", value)), "--device", "cpu"]


@pytest.mark.usefixtures("cells_in_this_process")
def test_a_sweep_from_training_to_tables_and_figures(folder, capsys):
    captured = printed_by(capsys, [*COMMAND, "--variants", "exlm,mlm", "--workers", "1", "--out", "run", "--json"])
    assert "leaves it out: mlm-plus-plus" in " ".join(captured.err.split())  # which `--set` changes
    result = json.loads(captured.out)
    assert [variant["variant"] for variant in result["variants"]] == ["exlm", "mlm"]
    exlm, mlm = result["variants"]
    assert (exlm["objective"], exlm["num_states_per_mask"], exlm["steps"], exlm["seeds"]) == ("exlm", 4, 4, [1])
    ratios = {f"entropy_bits_at_{ratio}" for ratio in (0.15, 0.387, 0.5, 0.622)}
    assert {"loss", "mask_accuracy", "entropy_bits", "effective_states", "entropy_posterior_bits"} | ratios <= {*exlm}
    assert mlm["changes"]["objective"] == "mlm"
    assert all(Path(path).is_file() for path in result["files"])
    rows = read_rows(folder / "run/report/sweep.csv")
    assert [float(row["loss"]) for row in rows] == pytest.approx([exlm["loss"], mlm["loss"]], rel=1e-5)
    assert read_run_json(folder / "run").command == "sweep"

    # done: the report again, nothing trained; the recipe of the run names its variants
    captured = printed_by(capsys, ["sweep", "--resume", "run"])
    assert "2 cells, 2 of them done" in captured.err
    assert captured.out.startswith("Variants of quickstart-ablations\n")
    assert refusal_of(capsys, "pretrain", "--resume", "run").endswith("`exlm sweep --resume run` continues it")
    assert refusal_of(capsys, "repeat-mlm", "--resume", "run").startswith("error: run: a run of `exlm sweep`")
    divergence = Divergence(step=2, epoch=0, value="nan", sample_index=(1,))
    write_json(folder / "run/cells/mlm/seed-1/pretrain/diverged.json", divergence)
    assert main(["sweep", "--resume", "run"]) == 1
    assert "diverged" in capsys.readouterr().out


@pytest.fixture
def sweep(folder: Path) -> Path:
    """Return what a sweep with the paper's numbers leaves, without its models."""
    run = folder / "run"
    run.mkdir()
    recipe = load_recipe("table-2", kind=SweepRecipe)
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    update_run_json(run, {"command": recipe.run_by, "num_cells": len(recipe.plan())})
    for result in sweep_results("table-2"):
        write_cell(run / "cells" / result.plan.name, result)
    return run


def test_eval_prints_the_tables_of_the_newest_sweep_and_writes_them_where_and_as_asked(sweep, folder, capsys):
    """None of its cells is taken for a run, nor a sweep without a finished cell."""
    (folder / "runs").mkdir()
    sweep.rename(folder / "runs/sweep")
    for name in ("cells/exlm/seed-1/pretrain", "../unfinished"):
        run = folder / "runs/sweep" / name
        (run / "checkpoints/step-1").mkdir(parents=True)
        update_run_json(run, {"command": "pretrain"})
    update_run_json(folder / "runs/unfinished", {"command": "pretrain", "num_cells": 4})
    (folder / "runs/unfinished/recipe.yaml").touch()
    captured = printed_by(capsys, ["eval", "--format", "csv", "--out", "paper", "--no-figures"])
    assert captured.err == "run: runs/sweep, the newest one\n"
    ours = [line.split()[:7] for line in captured.out.splitlines() if line.startswith("ours ")]
    assert ["ours", "Vanilla", "MLM", "83.6", "90.0", "90.3", "54.7"] in ours
    names = {path.name for path in (folder / "paper").iterdir()}
    assert names == {"sweep.csv", "sweep.md", "variants.csv", "table-2.csv"}
    assert not (folder / "runs/sweep/report").exists()
    assert refusal_of(capsys, "eval", "--entropy").startswith("error: no run was given")


def test_eval_of_an_unfinished_sweep_says_what_is_missing(sweep, capsys):
    (sweep / "cells" / "exlm" / "seed-1" / "scores.csv").unlink()
    captured = printed_by(capsys, ["eval", "run", "--no-figures"])
    assert captured.err.startswith("4 of 5 cells are done; ")
    ours = [line.split()[1:3] for line in captured.out.splitlines() if line.startswith("ours ") and ":" not in line]
    assert ours == [["ExLM", "w/o"], ["ExLM", "w/o"], ["Vanilla", "MLM"], ["Vanilla", "MLM++"]]
    assert refusal_of(capsys, "eval", "run", "run2").startswith("error: give one sweep at a time")
    assert refusal_of(capsys, "eval", "run", "--data", "x.txt").startswith("error: run: a run of `exlm sweep`")
    for path in sweep.glob("cells/*/*/scores.csv"):
        path.unlink()
    assert refusal_of(capsys, "eval", "run") == (
        "error: run: none of its 5 cells is done\nhint: continue with `exlm sweep --resume run`"
    )
