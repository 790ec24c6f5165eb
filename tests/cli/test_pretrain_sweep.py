"""`exlm pretrain --sweep`: its files, what scripts read, resumption, and each mistake in one line."""

import csv
import json
from pathlib import Path

import pytest

from exlm_cli.cli.app import main
from exlm_cli.config.load import load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.run_dir import read_run_json

Capture = pytest.CaptureFixture[str]

SETS = (
    "pretrain.data.bundled_rows=300", "pretrain.model.width=32", "pretrain.model.ffn_width=16",
    "pretrain.model.num_layers=1", "pretrain.optim.warmup_steps=1", "pretrain.train.max_steps=4",
    "pretrain.train.checkpoint_every_steps=2", "pretrain.train.batch_sequences=4", "measure_sequences=8",
    "pretrain.train.alignment_backend=torch", "variants.mlm-plus-plus={train.max_steps: 8}",
)  # fmt: skip
TINY = [word for value in SETS for word in ("--set", value)]
COMMAND = ["pretrain", "--sweep", "quickstart-ablations", *TINY, "--device", "cpu"]


@pytest.mark.slow
def test_a_sweep_from_training_to_tables_and_figures(folder: Path, capsys: Capture) -> None:
    words = [*COMMAND, "--variants", "exlm,mlm", "--jobs", "1", "--out", "run"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [v["variant"] for v in result["variants"]] == ["exlm", "mlm"]
    exlm, mlm = result["variants"]
    assert (exlm["objective"], exlm["num_states_per_mask"], exlm["steps"], exlm["seeds"]) == ("exlm", 4, 4, [1])
    assert {"loss", "mask_accuracy", "entropy_bits", "effective_states", "entropy_posterior_bits"} <= exlm.keys()
    assert mlm["changes"]["objective"] == "mlm"
    assert set(exlm["entropy_at"]) == {"0.15", "0.387", "0.5", "0.622"}
    names = {Path(path).name for path in result["files"]}
    assert names == {"sweep.csv", "sweep.md", "curves.png", "curves.svg", "figure-12.png", "figure-12.svg"}
    assert all(Path(path).is_file() for path in result["files"])
    with (folder / "run" / "report" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == pytest.approx([exlm["loss"], mlm["loss"]], rel=1e-5)
    assert read_run_json(folder / "run")["command"] == "pretrain --sweep"

    # done: told again in words, nothing trained; its recipe says which variants it has
    assert main(["pretrain", "--resume", "run"]) == 0
    captured = capsys.readouterr()
    assert "2 cells, 2 of them done" in captured.err
    assert captured.out.startswith("Variants of quickstart-ablations\n")
    assert "Entropy of the predictions in bits over the mask ratio p" in captured.out


def test_a_dry_run_prints_the_whole_sweep(folder: Path, capsys: Capture) -> None:
    words = [*COMMAND, "--variants", "mlm, exlm", "--seeds", "4,5", "--task", "glue/rte", "--on-invalid", "skip"]
    assert main([*words, "--dry-run"]) == 0
    path = folder / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    recipe = load_recipe(str(path), kind=SweepRecipe)
    assert (recipe.seeds, recipe.tasks, recipe.device, recipe.only) == ((4, 5), ("glue/rte",), "cpu", ("mlm", "exlm"))
    assert (recipe.pretrain.train.max_steps, recipe.pretrain.data.on_invalid) == (4, "skip")
    assert sorted(folder.iterdir()) == [path]


def test_the_task_none_leaves_fine_tuning_out(folder: Path, capsys: Capture) -> None:
    assert main(["pretrain", "--sweep", "table-2", "--task", "none", "--dry-run"]) == 0
    assert "\ntasks: []\n" in capsys.readouterr().out


def test_a_run_directory_says_itself_that_it_is_a_sweeps(folder: Path, capsys: Capture) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "recipe.yaml").write_text("extends: quickstart-ablations\nname: mine\n")
    (folder / "run" / "run.json").write_text("{}")
    assert main(["pretrain", "--resume", "run", "--variants", "mlm", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("name: mine\n")
    assert "\nonly:\n- mlm\n" in printed


SWEEP = ["--sweep", "quickstart-ablations"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--sweep", "tabel-2"],
            "error: unknown recipe `tabel-2`\n\nhint: did you mean `table-2`?",
        ),
        (["--sweep", "text-base"], "error: `text-base` is a recipe of `exlm pretrain`, not of `exlm pretrain --sweep`"),
        (["--recipe", "table-2"], "error: `table-2` is a recipe of `exlm pretrain --sweep`, not of `exlm pretrain`\n"),
        (
            [*SWEEP, "--recipe", "text-base"],
            "error: `--recipe text-base` does not go with `--sweep quickstart-ablations`\n\n"
            "hint: what its variants have in common is changed with `--set pretrain.KEY=VALUE`\n",
        ),
        (
            [*SWEEP, "--seed", "3"],
            "error: `--seed 3` is of one run; `--sweep quickstart-ablations` has several\n\n"
            "hint: for example `--seeds 3`\n",
        ),
        ([*SWEEP, "--seeds", "1,1"], "error: `--seeds 1,1` gives 1 twice\n"),
        ([*SWEEP, "--resume", "r"], "error: `--sweep quickstart-ablations` does not go with `--resume`\n"),
        (["--resume", "r", "--out", "o"], "error: `--out o` does not go with `--resume`\n"),
        (
            [*SWEEP, "--variants", "mlm,exml"],
            "error: `--variants mlm,exml`: quickstart-ablations has no variant `exml`\n\nhint: did you mean `exlm`? ",
        ),
        (
            [*SWEEP, "--variants", "zzz"],
            "error: `--variants zzz`: quickstart-ablations has no variant `zzz`\n\n"
            "hint: quickstart-ablations has mlm, ",
        ),
        ([*SWEEP, "--variants", "mlm,mlm"], "error: `--variants mlm,mlm` gives mlm twice\n"),
        ([*SWEEP, "--task", "Mnli"], "error: `--set tasks=[Mnli]`: `tasks` is [Mnli]; accepted: a list like "),
        (
            ["--recipe", "quickstart-text", "--jobs", "2"],
            "error: `--jobs 2` is for a sweep\n\nhint: name one with `--sweep`, or leave it out\n",
        ),
        (["--recipe", "quickstart-text", "--variants", "mlm"], "error: `--variants mlm` is for a sweep\n"),
        (["--recipe", "quickstart-text", "--task", "none"], "error: `--task none` is for a sweep\n"),
        (["--recipe", "quickstart-text", "--seeds", "1"], "error: `--seeds 1` is for a sweep\n"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(folder: Path, words: list[str], said: str, capsys: Capture) -> None:
    (folder / "r").mkdir()
    (folder / "r" / "recipe.yaml").write_text("extends: quickstart-ablations\n")
    assert main(["pretrain", *words, "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.slow
def test_inputs_that_are_not_there_leave_nothing_behind(folder: Path, capsys: Capture) -> None:
    assert main([*COMMAND, "--set", "pretrain.data.train=none.txt", "--out", "run"]) == 2
    assert "none.txt" in capsys.readouterr().err.splitlines()[0]
    assert not (folder / "run").exists()
