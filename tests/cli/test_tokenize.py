"""`exlm tokenize`: what it writes, what it prints, and that a second run finds the first one's work."""

from pathlib import Path

from exlm_cli.cli.app import main
from exlm_cli.config.load import load_recipe
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.run_dir import create_run_dir, sole_process
from tests.cli.asserts import refusal_of, result_of


def test_inputs_of_a_kind_become_tokens_and_the_second_run_finds_them(folder, capsys):
    (folder / "corpus").mkdir()
    for name, count in (("a.txt", 300), ("b.txt", 301)):
        (folder / "corpus" / name).write_text("the cat sat on the mat\n\n" * count)
    words = ["tokenize", "corpus", "--kind", "text", "--vocab-size", "270", "--out"]
    first, second = result_of(capsys, *words, "tokens"), result_of(capsys, *words, "again")
    assert (first.pop("was_cached"), second.pop("was_cached")) == (False, True)
    in_folders = ("tokenizer", "recipe")
    assert {k: v for k, v in first.items() if k not in in_folders} == {
        k: v for k, v in second.items() if k not in in_folders
    }
    tokenizer = Tokenizer.load(Path(first["tokenizer"]), "text")
    assert tokenizer.vocab_size == first["vocab_size"] <= 270
    # every row is a document of the same tokens, so both splits together are rows times its length
    row = len(tokenizer.encode("the cat sat on the mat"))
    assert first["train_tokens"] + first["valid_tokens"] >= 601 * row
    assert (first["train_sequences"] > 0, first["num_rejected"]) == (True, 0)


def test_the_recipe_it_writes_trains_with_the_same_tokenizer_and_inputs(folder, capsys):
    (folder / "some.smi").write_text("CCO\nc1ccccc1\nCCN\nCCCl\n" * 30)
    assert main(["tokenize", "some.smi", "--kind", "smiles", "--out", "tokens"]) == 0
    written = load_recipe("tokens/recipe.yaml")
    assert written == load_recipe("smiles-small", [f"data.train={folder}/some.smi"])
    out = capsys.readouterr().out
    assert out.startswith("tokenizer        tokens/tokenizer.json\nrecipe           tokens/recipe.yaml\n")
    assert "was cached       no\n" in out


def test_molecules_that_rdkit_refuses_are_listed_on_request(folder, capsys):
    (folder / "some.smi").write_text("CCO\nC1CC\nc1ccccc1\n" * 20)
    words = ["tokenize", "some.smi", "--kind", "smiles", "--out", "out", "--on-invalid", "skip"]
    assert result_of(capsys, *words)["num_rejected"] == 20
    assert len((folder / "out" / "rejected.csv").read_text().splitlines()) == 1 + 20


def test_a_failure_keeps_a_folder_that_was_there_and_the_beginning_of_another_run(folder, capsys):
    (folder / "mine").mkdir()
    assert "no such file" in refusal_of(capsys, "tokenize", "none.smi", "--kind", "smiles", "--out", "mine")
    assert not list((folder / "mine").iterdir())
    run = create_run_dir(folder / "run", "a")
    with sole_process(run, is_new=True):
        said = refusal_of(capsys, "tokenize", "none.smi", "--kind", "smiles", "--out", "run")
    assert said.startswith("error: run: another process is using this run directory")
    assert sorted(path.name for path in run.iterdir()) == [".beginning", ".lock"]
