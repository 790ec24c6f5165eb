"""`exlm eval` on small runs: tables for people, JSON for programs, files for both, mistakes told in one line."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.cli.app import main
from exlm_cli.finetune.results import read_results
from exlm_cli.run_dir import update_run_json
from tests.unit.finetune.finetuned_runs import glue_run, molecule_run, smiles_pretrained, squad_run, write_rows
from tests.unit.finetune.synthetic import make_pretrained
from tests.unit.tasks.glue_files import content
from tests.unit.tasks.squad.test_task import document

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a pre-trained and a fine-tuned run of each kind; tests only read it."""
    root = tmp_path_factory.mktemp("made")
    molecule_run(_sub(root, "molecules"), smiles_pretrained(_sub(root, "smiles")))
    text = make_pretrained(root / "text", data={"sequence_length": 24, "bundled_rows": 200}, train={"max_steps": 3})
    glue_run(_sub(root, "rte"), text, "rte")
    squad_run(_sub(root, "squad"), text)
    return root


def _sub(root: Path, name: str) -> Path:
    (root / name).mkdir()
    return root / name


def result_of(capsys: Capture, *words: object) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_help_needs_no_torch() -> None:
    code = "import sys; from exlm_cli.cli.app import main; main(['eval', '--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_fine_tuned_run_is_told_in_a_table_that_fits_and_drawn(
    folder: Path, made: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["eval", str(made / "molecules/run"), str(made / "rte/run"), "--out", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(name in text for name in ("roc_auc", "accuracy", "±", "mean of 2 seeds", "Table 3: GLUE", "RoBERTa"))
    kinds = [f"{kind}.{suffix}" for kind in ("curves", "confusion") for suffix in ("png", "svg")]
    names = [f"{run}-run-{split}-{kind}" for run, split in (("molecules", "test"), ("rte", "valid")) for kind in kinds]
    assert lines[-len(names) :] == [f"wrote out/{name}" for name in names]
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(names)


def test_json_has_results_as_they_are_and_those_of_one_run_on_top(made: Path, capsys: Capture) -> None:
    run = made / "molecules/run"
    result = result_of(capsys, "eval", run, "--no-figures")
    assert result["split_sizes"] == read_results(run)["split_sizes"]
    assert sum(result["split_sizes"].values()) == 72
    assert result["metrics"] == read_results(run)["metrics"]
    assert {"roc_auc", "average_precision", "accuracy"} <= set(result["metrics"]["test"])
    assert (result["runs"][0]["name"], result["files"]) == ("run", [])
    both = result_of(capsys, "eval", run, made / "squad/run", "--no-figures")
    assert "metrics" not in both
    assert [entry["name"] for entry in both["runs"]] == ["molecules/run", "squad/run"]


@pytest.mark.parametrize("formats", ["markdown,csv,latex", "csv"])
def test_tables_are_written_in_the_formats_asked_for(folder: Path, made: Path, capsys: Capture, formats: str) -> None:
    result = result_of(capsys, "eval", made / "rte/run", "--no-figures", "--format", formats, "--out", "out")
    suffixes = {"markdown": ".md", "csv": ".csv", "latex": ".tex"}
    wanted = [f"{name}{suffixes[f]}" for name in ("scores-glue-rte", "table-3") for f in formats.split(",")]
    assert result["files"] == [f"out/{name}" for name in wanted]
    with (folder / "out/table-3.csv").open() as file:
        rows = list(csv.DictReader(file))
    (mine,) = [row for row in rows if row["source"] == "ours"]
    accuracy = read_results(made / "rte/run")["metrics"]["valid"]["accuracy"]["mean"]
    assert mine["RTE"].startswith(f"{100 * accuracy:.1f} ±")
    assert (mine["QNLI"], mine["seeds"]) == ("-", "2")
    (paper,) = [row for row in rows if row["model"] == "RoBERTa (MLM)"]
    assert (paper["RTE"], paper["seeds"], paper["parameters"]) == ("75.5", "5", "128 M")


def test_pretrained_runs_are_scored_side_by_side_on_given_data(folder: Path, made: Path, capsys: Capture) -> None:
    (folder / "valid.txt").write_text("amber birch\ncedar fern elder\n")
    step = made / "text/checkpoints/step-3"
    result = result_of(capsys, "eval", made / "text", step, "--data", "valid.txt")
    assert [entry["name"] for entry in result["runs"]] == ["text", "text/step-3"]
    first, second = (entry["metrics"] for entry in result["runs"])
    assert first == second
    assert first["perplexity"] == pytest.approx(np.exp(first["loss"]), rel=1e-9)
    assert {"mask_accuracy", "entropy_bits", "entropy_posterior_bits", "effective_states"} <= set(first)
    assert main(["eval", str(made / "text"), "--data", "valid.txt"]) == 0
    out = capsys.readouterr().out
    assert "effective states per mask" in out
    assert "note: text: exlm, step 3" in out


def test_new_molecules_come_back_with_probabilities_and_reasons(folder: Path, made: Path, capsys: Capture) -> None:
    write_rows(folder / "new.csv", ["id", "mol", "active"], [["a", "CCO", "1"], ["b", "((", ""], ["c", "CN", "0"]])
    run = made / "molecules/run"
    result = result_of(capsys, "eval", run, "--data", "new.csv", "--predictions", "deep/out.csv")
    assert (result["rows"], result["unreadable_rows"], result["files"]) == (3, 1, ["deep/out.csv"])
    assert result["metrics"]["roc_auc"] in (0.0, 1.0)
    with (folder / "deep/out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert [bool(row["problem"]) for row in rows] == [False, True, False]
    assert 0 < float(rows[0]["active_probability"]) < 1
    assert main(["eval", str(run), "--data", "new.csv", "--out", "here", "--smiles-column", "mol"]) == 0
    out = capsys.readouterr().out
    assert "unreadable rows    1" in out
    assert "note: scored without the labels that the table lacks: toxic" in out
    assert out.endswith("wrote here/predictions-new.csv\n")
    assert (folder / "here/predictions-new.csv").read_text() == (folder / "deep/out.csv").read_text()


def test_a_metric_that_is_not_defined_is_null(folder: Path, made: Path, capsys: Capture) -> None:
    write_rows(folder / "new.csv", ["mol", "active"], [["CCO", "1"]])
    words = ["eval", str(made / "molecules/run"), "--data", "new.csv", "--out", "out"]
    assert result_of(capsys, *words)["metrics"]["roc_auc"] is None
    assert main(words) == 0
    assert "roc auc            not defined" in capsys.readouterr().out


@pytest.mark.parametrize("run", ["smiles/pretrained", "molecules/run"])
def test_vectors_of_any_run_are_written(folder: Path, made: Path, capsys: Capture, run: str) -> None:
    write_rows(folder / "new.csv", ["smiles"], [["CCO"], ["(("]])
    result = result_of(capsys, "eval", made / run, "--data", "new.csv", "--embeddings", "a/v.npz")
    assert (result["rows"], result["unreadable_rows"], result["files"]) == (2, 1, ["a/v.npz"])
    vectors = np.load(folder / "a/v.npz")
    assert vectors["cls"].shape == vectors["mean"].shape == (2, 16)


def test_glue_and_squad_files_are_answered_in_the_official_layouts(folder: Path, made: Path, capsys: Capture) -> None:
    (folder / "dev.tsv").write_text(content("rte"), encoding="utf-8")
    result = result_of(capsys, "eval", made / "rte/run", "--data", "dev.tsv", "--predictions", "rte.tsv")
    assert set(result["metrics"]) == {"accuracy"}
    assert (folder / "rte.tsv").read_text().splitlines()[0] == "index\tprediction"
    (folder / "dev-v2.0.json").write_text(json.dumps(document("Moss")))
    result = result_of(capsys, "eval", made / "squad/run", "--data", "dev-v2.0.json", "--out", "out")
    assert result["files"] == ["out/predictions-dev-v2.0.json", "out/predictions-dev-v2.0-no-answer.json"]
    assert {"exact_match", "f1", "has_answer_f1"} <= set(result["metrics"])
    answers, odds = (json.loads((folder / file).read_text()) for file in result["files"])
    assert list(answers) == list(odds) == ["Moss-0", "Moss-1"]


def test_entropy_over_mask_ratios_is_told_written_and_drawn(folder: Path, made: Path, capsys: Capture) -> None:
    (folder / "valid.txt").write_text("amber birch cedar\ncedar fern elder\n")
    mlm = make_pretrained(folder / "mlm", objective="mlm", model={"rope": "1d"})
    words = ["eval", "--entropy", made / "text", mlm, "--data", "valid.txt", "--out", "out"]
    result = result_of(capsys, *words, "--mask-ratios", "0.2,0.6", "--num-states", "2,3", "--format", "csv")
    found = [(e["name"], e["num_states_per_mask"], e["num_repeats"], e["mask_ratio"]) for e in result["entropies"]]
    assert found == [*(("text", k, 1, p) for k in (2, 3) for p in (0.2, 0.6)), ("mlm", 1, 1, 0.2), ("mlm", 1, 1, 0.6)]
    assert [e["entropy_posterior_bits"] is None for e in result["entropies"]] == [False] * 4 + [True] * 2
    assert result["files"] == ["out/entropy.png", "out/entropy.svg", "out/entropy.csv"]
    assert all((folder / file).is_file() for file in result["files"])
    assert main([*map(str, words[:-2]), "--no-figures"]) == 0
    assert not (made / "text/report").exists()
    out = capsys.readouterr().out
    assert all(text in out for text in ("mean over states", "posterior-weighted", "15 %", "38.7 %", "78.9 %"))
    assert main(["eval", "--entropy", str(mlm), "--num-states", "2,3"]) == 2
    error = "error: `--num-states 2,3` is for masks with states, which none of these runs has\n"
    assert error in capsys.readouterr().err


def test_without_a_run_the_newest_one_is_taken(folder: Path, capsys: Capture) -> None:
    make_pretrained(folder / "runs/one")
    (folder / "runs/unfinished").mkdir()
    update_run_json(folder / "runs/unfinished", {"command": "finetune"})
    (folder / "runs/damaged").mkdir()
    (folder / "runs/damaged/run.json").write_text("{")
    (folder / "valid.txt").write_text("amber birch\n")
    assert main(["eval", "--data", "valid.txt"]) == 0
    captured = capsys.readouterr()
    assert "run: runs/one, the newest one\n" in captured.err
    assert "loss, nats per target" in captured.out


@pytest.fixture
def refused(capsys: Capture) -> Callable[..., str]:
    """Return a function that runs a command, expects it to be refused and returns its `error:` line."""

    def run(*words: str) -> str:
        assert main(["eval", *words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (error,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        return error.removeprefix("error: ")

    return run


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "no run was given, and there is none with a checkpoint under runs/"),
        ("nowhere", "nowhere: no such run directory"),
        (".", ".: not a run directory: it has no run.json"),
        ("unfinished", "unfinished: the run is not finished: it has no results.json"),
        ("grid", "grid: a run of `exlm repeat-mlm`; runs of `exlm pretrain` and `exlm finetune` are scored"),
        ("M M", "M is given twice"),
        ("P --out new", "`--out new`: there are no files to write of this"),
        ("M --no-figures --out new/folder", "`--out new/folder`: there are no files to write of this"),
        ("Q --out new", "`--out new`: there are no files to write of this"),
        ("P --entropy --no-figures --out new", "`--out new`: there are no files to write of this"),
        ("M --format html", "`--format html`: `html` is none of markdown, csv, latex"),
        ("M --format csv --data new.csv", "`--format` is for tables of scores"),
        ("M --out file", "file: no such folder can be made: File exists"),
        ("M --data new.csv --out file", "file: no such folder can be made: File exists"),
        ("M --data ~nosuchuser/x", "~nosuchuser/x: there is no home folder that `~nosuchuser` could stand for"),
        ("M --data new.csv --predictions file/x.csv", "file: no such folder can be made: File exists"),
        ("M --data new.csv --embeddings file/x.npz", "file: no such folder can be made: File exists"),
        ("M --data new.csv --predictions folder.csv", "folder.csv: the file could not be written: Is a directory"),
        ("M --data none.csv --embeddings folder.npz", "folder.npz: the file could not be written: Is a directory"),
        ("M --data new.csv --predictions x.json", "`--predictions x.json`: predictions of csv go into a .csv file"),
        ("M --data new.csv --embeddings x.csv",
         "`--embeddings x.csv`: accepted are names that end in .npz or .parquet"),
        ("M --predictions x.csv", "`--predictions` needs one `--data` file; none is given"),
        ("M --embeddings x.npz --data a --data b", "`--embeddings` needs one `--data` file; 2 are given"),
        ("M R --data new.csv", "`--data` applies one run to new rows; 2 are given"),
        ("P --data new.csv --predictions x.csv", "`--predictions` needs a fine-tuned model; P is a pre-trained one"),
        ("M --data new.csv --predictions x.csv --embeddings x.npz", "give `--predictions` or `--embeddings`, not both"),
        ("M --smiles-column a --text-column b", "give `--smiles-column` or `--text-column`, not both"),
        ("M --smiles-column a",
         "`--smiles-column` and `--text-column` choose a column of `--data` to predict or embed"),
        ("M --mask-ratios 0.5", "`--mask-ratios` and `--num-states` go with `--entropy`"),
        ("P --entropy --mask-ratios 15", "`--mask-ratios 15`: `15` is not a number above 0 and below 1"),
        ("P --entropy --num-states 0", "`--num-states 0`: `0` is not a whole number from 1 to 64"),
        ("M --entropy", "`--entropy` is of pre-trained models; M is a fine-tuned one"),
        ("M --data none.csv", "none.csv: no such file"),
        ("M --data none.csv --out new/folder", "none.csv: no such file"),
        ("P --data none.csv --embeddings new/x.npz", "none.csv: no such file"),
        ("M --data new.csv --text-column mol", "`--text-column mol`: M is a model of SMILES"),
        ("T --data new.csv --embeddings x.npz --smiles-column mol", "`--smiles-column mol`: T is a model of text"),
        ("M --data new.csv --predictions new.csv",
         "`--predictions new.csv` would overwrite new.csv, the file of `--data`"),
        ("M --data new.csv --predictions ./linked.csv",
         "`--predictions linked.csv` would overwrite new.csv, the file of `--data`"),
        ("Q --data a-no-answer.json --predictions a.json",
         "`--predictions a.json` would overwrite a-no-answer.json, the file of `--data`"),
        ("M --data rows.parquet --embeddings rows.parquet",
         "`--embeddings rows.parquet` would overwrite rows.parquet, the file of `--data`"),
        ("M --data new.csv --predictions p.csv --out new/folder",
         "`--out new/folder` does not go with `--predictions p.csv`"),
        ("P --data new.csv --embeddings x.npz --out new/folder",
         "`--out new/folder` does not go with `--embeddings x.npz`"),
        ("P --entropy --smiles-column mol", "`--smiles-column mol` does not go with `--entropy`"),
        ("T --entropy --text-column a", "`--text-column a` does not go with `--entropy`"),
        ("M --data empty.csv", "empty.csv: the file is empty"),
        ("M --data new.csv --smiles-column smile", "new.csv: no column `smile`; there are `mol`, `active`"),
        ("M --data other.csv",
         "other.csv: which column holds the smiles? There are `a`, `b`; none of them is named like it"),
        ("M --data twice.csv", "twice.csv: the header names column `mol` twice"),
        ("M --data bad.csv", "bad.csv:2: `active` is `active`; accepted: 0/1, true/false, yes/no, t/f, y/n, or empty"),
        ("R --data new.csv", "new.csv: rte needs the columns `sentence1` `sentence2`; there are `mol`, `active`"),
        ("Q --data new.csv", "new.csv: not JSON: Expecting value at line 1 column 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line_and_leaves_nothing(
    folder: Path, made: Path, refused: Callable[..., str], words: str, error: str
) -> None:
    runs = {"M": "molecules/run", "R": "rte/run", "Q": "squad/run", "P": "smiles/pretrained", "T": "text"}
    for name, target in runs.items():
        (folder / name).symlink_to(made / target)
    for name, command in (("unfinished", "finetune"), ("grid", "repeat-mlm")):
        (folder / name).mkdir()
        update_run_json(folder / name, {"command": command})
    files = {
        "file": "", "empty.csv": "", "new.csv": "mol,active\nCCO,1\n", "other.csv": "a,b\nCCO,1\n",
        "rows.parquet": "rows", "a-no-answer.json": "{}",
        "twice.csv": "mol,mol\nC,C\n", "bad.csv": "mol,active\nCCO,active\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "linked.csv").symlink_to("new.csv")
    for name in ("folder.csv", "folder.npz"):
        (folder / name).mkdir()
    before = sorted(path for path in folder.rglob("*"))
    assert refused(*words.split()) == error
    assert sorted(path for path in folder.rglob("*")) == before


def test_smiles_are_refused_by_no_text_model_but_read_as_text_alone(
    folder: Path, made: Path, refused: Callable[..., str]
) -> None:
    """A model of text finds no column of text in a table of molecules."""
    write_rows(folder / "new.csv", ["smiles"], [["CCO"]])
    error = refused(str(made / "text"), "--data", "new.csv", "--embeddings", "v.npz")
    assert error == "new.csv: which column holds the text? There are `smiles`; none of them is named like it"


def test_validation_files_with_a_bad_row_are_refused_with_a_hint_that_eval_has(
    folder: Path, made: Path, capsys: Capture
) -> None:
    (folder / 'odd "name".smi').write_text("CCO\nC1CC\n")
    assert main(["eval", str(made / "smiles/pretrained"), "--data", 'odd "name".smi']) == 2
    error, _, hint = capsys.readouterr().err.strip().splitlines()[-3:]
    assert error == 'error: odd "name".smi:2: `C1CC`: RDKit cannot parse it: it breaks the SMILES grammar'
    assert hint == "hint: mend the row, or take it out of the file"
    (folder / "new.csv").write_text("structure,y\nCCO,1\n")
    assert main(["eval", str(made / "smiles/pretrained"), "--data", "new.csv"]) == 2
    error, _, hint = capsys.readouterr().err.strip().splitlines()[-3:]
    assert error.startswith("error: new.csv: which column holds the smiles?")
    assert hint == "hint: call it as the run's own data do, or give a .txt file with one row a line"


@pytest.mark.parametrize("command", ["eval", "inspect-dag"])
def test_the_default_device_is_not_the_recipes(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    told = " ".join(re.sub("[^a-z: ]", " ", capsys.readouterr().out.lower()).split())
    assert "the recipe" not in told
    assert "default: auto" in told
