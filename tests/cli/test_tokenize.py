"""`exlm tokenize`: what it writes, what it prints, and that a second run finds the first one's work."""

import json
from pathlib import Path

from exlm_cli.config.load import load_recipe
from exlm_cli.data.tokenizer import Tokenizer
from tests.cli.asserts import printed_by, result_of


def test_inputs_of_a_kind_become_tokens_the_second_run_finds_them_and_a_damaged_cache_heals(folder, capsys):
    (folder / "corpus").mkdir()
    for name, count in (("a.txt", 300), ("b.txt", 301)):
        (folder / "corpus" / name).write_text("the cat sat on the mat\n\n" * count)
    words = ["tokenize", "corpus", "--kind", "text", "--vocab-size", "270", "--out"]
    first, second = (result_of(capsys, *words, out) for out in ("tokens", "again"))
    assert (first["was_cached"], second["was_cached"]) == (False, True)
    assert second == first | {name: second[name] for name in ("was_cached", "tokenizer", "recipe")}
    tokenizer = Tokenizer.load(Path(first["tokenizer"]), "text")
    assert tokenizer.vocab_size == first["vocab_size"] <= 270
    # every row is a document of the same tokens, so both splits together are rows times its length
    row = len(tokenizer.encode("the cat sat on the mat"))
    assert first["train_tokens"] + first["valid_tokens"] >= 601 * row
    assert (first["train_sequences"] > 0, first["num_rejected"]) == (True, 0)
    # the last two words exchanged: it is a tokenizer still, and not the one that was written there
    (cached,) = (folder.parent / "cache/tokenizers").glob("*.json")
    content, whole = json.loads(cached.read_text()), cached.read_bytes()
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    content["model"]["vocab"] = vocabulary | {one: vocabulary[other], other: vocabulary[one]}
    cached.write_text(json.dumps(content))
    assert f"{cached}: " in printed_by(capsys, [*words, "healed"]).err
    assert cached.read_bytes() == (folder / "healed/tokenizer.json").read_bytes() == whole


def test_the_recipe_it_writes_trains_with_the_same_inputs_and_rows_that_are_refused_are_listed(folder, capsys):
    (folder / "some.smi").write_text("CCO\nC1CC\nc1ccccc1\n" * 20)
    words = ["tokenize", "some.smi", "--kind", "smiles", "--out", "tokens", "--on-invalid", "skip"]
    out = printed_by(capsys, words).out
    assert out.startswith("tokenizer        tokens/tokenizer.json\nrecipe           tokens/recipe.yaml\n")
    assert "was cached       no\n" in out
    overrides = [f"data.train={folder}/some.smi", "data.on_invalid=skip"]
    assert load_recipe("tokens/recipe.yaml") == load_recipe("smiles-small", overrides)
    assert len((folder / "tokens" / "rejected.csv").read_text().splitlines()) == 1 + 20
