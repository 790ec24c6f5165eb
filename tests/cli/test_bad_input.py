"""Bad input of every kind: one clear error on stderr, nothing on stdout, exit code 2, nothing half-written."""

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exlm_cli.cli.app import main
from exlm_cli.train.checkpoint import verify_checkpoint
from tests.cli.conftest import TINY

Capture = pytest.CaptureFixture[str]

SETS = [word for value in TINY for word in ("--set", value)]
PRETRAIN = ["pretrain", "--recipe", "quickstart-text", *SETS]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(folder: Path) -> None:
    """Run every test of this file there."""


@pytest.fixture
def refused(capsys: Capture) -> Callable[..., str]:
    """Return a function that runs a command, expects it to be refused and returns its `error:` line."""

    def run(*words: str) -> str:
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "Traceback" not in captured.err
        return errors[0].removeprefix("error: ")

    return run


def test_inputs_that_cannot_be_used_are_named(refused: Callable[..., str], folder: Path) -> None:
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "notes.doc").write_text("x")
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"words " * 100)[:-10])
    (folder / "none").mkdir()
    before = sorted(path.name for path in folder.iterdir())
    for given in ("missing.txt", "empty.txt", "binary.txt", "notes.doc", "cut.txt.gz", "none", "no-*.txt"):
        assert given in refused("tokenize", given, "--kind", "text", "--vocab-size", "300", "--out", "out")
        assert sorted(path.name for path in folder.iterdir()) == before


def test_a_home_folder_that_does_not_exist_is_named(
    refused: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "~nosuchuser/x.txt"
    told = f"{missing}: there is no home folder that `~nosuchuser` could stand for"
    for words in (
        ["tokenize", missing, "--kind", "text", "--out", "out"],
        ["tokenize", missing, "--kind", "text", "--set", "data.cache_dir=tokens", "--out", "out"],
        [*PRETRAIN, "--set", f"tokenizer.path={missing}", "--out", "out"],
        [*PRETRAIN, "--set", f"data.cache_dir={missing}", "--out", "out"],
    ):
        assert refused(*words) == told
        assert not (folder / "out").exists()
    monkeypatch.setenv("EXLM_CACHE_DIR", missing)
    assert refused(*PRETRAIN, "--out", "out") == told


def test_a_vocabulary_too_small_for_its_kind_is_refused(refused: Callable[..., str], folder: Path) -> None:
    (folder / "some.txt").write_text("some words\n" * 50)
    error = refused("tokenize", "some.txt", "--kind", "text", "--vocab-size", "20", "--out", "out")
    assert error.startswith("`tokenizer.vocab_size` 20 is too small for byte-level BPE")
    error = refused("tokenize", "some.txt", "--kind", "text", "--vocab-size", "3", "--out", "out")
    assert error == (
        "`--set tokenizer.vocab_size=3`: `tokenizer.vocab_size` is 3; accepted: a whole number at least 16 and at most "
        "1000000"
    )


def test_a_tokenizer_that_is_none_is_refused(refused: Callable[..., str], folder: Path) -> None:
    (folder / "some.txt").write_text("some words\n" * 50)
    (folder / "list.json").write_text("[1, 2]")
    for given in ("missing.json", "list.json"):
        assert given in refused("tokenize", "some.txt", "--kind", "text", "--tokenizer", given, "--out", "out")
    assert not (folder / "out").exists()


def test_a_molecule_that_rdkit_refuses_stops_or_is_listed(
    refused: Callable[..., str], folder: Path, capsys: Capture
) -> None:
    (folder / "some.smi").write_text("CCO\nC1CC\nc1ccccc1\n" * 20)
    words = ["tokenize", "some.smi", "--kind", "smiles", "--out", "out"]
    assert refused(*words, "--on-invalid", "error").startswith("some.smi:2: `C1CC`: RDKit cannot parse it")
    assert not (folder / "out").exists()
    assert main([*words, "--on-invalid", "skip", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rejected"] == 20
    assert len((folder / "out" / "rejected.csv").read_text().splitlines()) == 1 + 20


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["tokenize"], "give `--recipe`, or INPUTS with `--kind text` or `--kind smiles`"),
        (["tokenize", "a.txt"], "give `--recipe`, or INPUTS with `--kind text` or `--kind smiles`"),
        (["tokenize", "--kind", "text"], "give `--recipe`, or INPUTS with `--kind text` or `--kind smiles`"),
        (["tokenize", "--recipe", "text-small", "--kind", "text"], "`--kind` does not go with `--recipe`"),
        (["tokenize", "a.txt", "--kind", "text", "--tokenizer", "t.json", "--vocab-size", "300"],
         "`--vocab-size 300` does not go with `--tokenizer`"),
        (["pretrain"], "give either `--recipe` to start a run or `--resume` to go on with one"),
        (["pretrain", "--recipe", "a", "--resume", "b"],
         "give either `--recipe` to start a run or `--resume` to go on with one"),
        (["pretrain", "--resume", "a", "--out", "b"], "`--out b` does not go with `--resume`"),
        (["pretrain", "--resume", "nowhere"], "nowhere: not a run directory: it has no recipe.yaml"),
        (["pretrain", "--recipe", "no-such-thing"], "unknown recipe `no-such-thing`"),
        (["pretrain", "--recipe", "text-base", "--set", "train.max_steps=many"],
         "`--set train.max_steps=many`: `train.max_steps` is many; accepted: a whole number at least 1, or null"),
        (["pretrain", "--recipe", "text-small"], "`data.train` names no input"),
        ([*PRETRAIN, "--set", "data.sequence_length=400"],
         "recipes/pretrain/quickstart/quickstart-text.yaml with"),
    ],
)  # fmt: skip
def test_words_that_do_not_go_together_are_refused(
    refused: Callable[..., str], words: list[str], error: str, folder: Path
) -> None:
    assert refused(*words).startswith(error)
    assert not list(folder.rglob("*.yaml"))


def test_a_sequence_longer_than_the_model_takes_is_refused_before_anything_is_done(refused: Callable[..., str]) -> None:
    error = refused("pretrain", "--recipe", "text-base", "--set", "data.sequence_length=2048")
    assert error.endswith(
        "`model.max_length` is 2048, but `data.sequence_length` 2048 with `masking.num_repeats` 1, `mask_ratio` 0.15 "
        f"and `num_states_per_mask` 4 expands to {2048 + 3 * 307} positions"
    )


def test_a_folder_that_holds_something_is_left_as_it_is(refused: Callable[..., str], folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "notes.txt").write_text("mine")
    assert refused(*PRETRAIN, "--out", "run") == "run: the run directory is not empty"
    assert [path.name for path in (folder / "run").iterdir()] == ["notes.txt"]


def test_tokens_are_not_written_over_a_training_run(refused: Callable[..., str], folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    error = refused("tokenize", "--recipe", "quickstart-text", "--out", "run")
    assert error == "run holds a training run, whose tokenizer.json and recipe.yaml would be replaced"


@pytest.mark.parametrize("command", ["pretrain", "tokenize"])
def test_an_output_that_cannot_be_made_is_refused(refused: Callable[..., str], command: str, folder: Path) -> None:
    (folder / "file").touch()
    error = refused(command, "--recipe", "quickstart-text", *SETS, "--out", "file/run")
    assert error.startswith("file/run: ")
    assert error.endswith("Not a directory")


def test_a_disk_that_fills_up_under_a_checkpoint_leaves_none_and_the_run_can_go_on(folder: Path) -> None:
    """The file system really refuses: no file of the process may grow beyond 60 kB, which a checkpoint does."""
    assert main([*PRETRAIN, "--out", "before"]) == 0
    script = "import sys; from exlm_cli.cli.app import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, *PRETRAIN, "--out", "run"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: run/checkpoints/step-2: the checkpoint could not be written: " in done.stderr
    assert "File too large" in done.stderr
    assert "hint: free some space" in done.stderr
    assert list((folder / "run" / "checkpoints").iterdir()) == []
    assert main(["pretrain", "--resume", "run"]) == 0
    assert verify_checkpoint(folder / "run" / "checkpoints" / "step-4") is None
    weights = [
        (folder / run / "checkpoints" / "step-4" / "model.safetensors").read_bytes() for run in ("before", "run")
    ]
    assert weights[0] == weights[1]


def test_a_resumption_with_another_recipe_is_refused_and_changes_nothing(
    refused: Callable[..., str], folder: Path, capsys: Capture
) -> None:
    assert main([*PRETRAIN, "--out", "run"]) == 0
    capsys.readouterr()
    before = (folder / "run" / "recipe.yaml").read_bytes()
    error = refused("pretrain", "--resume", "run", "--set", "optim.lr=0.5")
    assert error.startswith("run/checkpoints/step-4: the recipe is not the one this run began with: `optim.lr` was 0.")
    assert error.endswith(" and is 0.5")
    assert (folder / "run" / "recipe.yaml").read_bytes() == before


def test_a_cache_that_cannot_be_written_is_named(
    refused: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("EXLM_CACHE_DIR", os.fspath(folder / "file" / "cache"))
    assert "the data cache cannot be written: Not a directory" in refused(*PRETRAIN, "--out", "run")
