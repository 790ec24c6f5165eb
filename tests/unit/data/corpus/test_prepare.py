"""From files to shards: what comes out, what is reused and when not, and that failures leave nothing behind."""

import csv
import itertools
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
from rdkit import Chem
from tokenizers import models

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.data.corpus import write
from exlm_cli.data.corpus.prepare import PreparedData, list_rejected, prepare_data
from exlm_cli.data.corpus.shards import TokenDataset
from exlm_cli.data.spellings import other_spellings
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from exlm_cli.errors import DataError, TokenizerError
from exlm_cli.progress import Bar, Progress, SilentProgress
from tests.recorder import Recorder
from tests.tiny import tiny_recipe

MOLECULES = ["CCO", "c1ccccc1", "CC(=O)O", "CCN", "CCCl", "C[C@@H](O)F", "CC#N", "OCCO", "c1ccncc1", "CCS"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(write, "_BATCH_ROWS", 9)
    monkeypatch.setattr(write, "_BATCH_CHARACTERS", 400)
    (tmp_path / "text.txt").write_text("\n".join(sample_sentences(300, seed=1)) + "\n")
    (tmp_path / "mols.smi").write_text("\n".join(MOLECULES) + "\n")
    return tmp_path


def _recipe(workplace: Path, *, tokenizer: dict[str, Any] | None = None, **data: Any) -> PretrainRecipe:
    chosen = {
        "kind": "text",
        "train": [f"{workplace}/text.txt"],
        "valid_fraction": 0.1,
        "sequence_length": 32,
        "sample_break": "none",
        "cache_dir": f"{workplace}/cache",
    }
    return tiny_recipe(
        data=chosen | data, tokenizer={"min_frequency": 1} | (tokenizer or {}), model={"max_length": 512},
        train={"microbatch_tokens": 4096},
    )  # fmt: skip


def _prepare(recipe: PretrainRecipe, progress: Progress | None = None) -> PreparedData:
    """Prepare a recipe's data, and list the skipped rows beside the cache."""
    progress = progress or SilentProgress()
    prepared = prepare_data(recipe, progress=progress)
    list_rejected(prepared, Path(str(recipe.data.cache_dir)).parent / "rejected.csv", progress)
    return prepared


def _texts(dataset: TokenDataset, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(dataset[i].tolist()) for i in range(len(dataset))]


def _smiles(workplace: Path, **data: Any) -> PretrainRecipe:
    return _recipe(workplace, **({"kind": "smiles", "train": [f"{workplace}/mols.smi"]} | data))


def _document(dataset: TokenDataset, tokenizer: Tokenizer) -> str:
    """Return packed text, an empty line between documents."""
    ids = (int(i) for n in range(len(dataset)) for i in dataset[n])
    return "".join("\n\n" if i == tokenizer.sep_id else tokenizer.decode([i]) for i in ids)


def test_packed_text_is_the_corpus_split_in_two(workplace):
    valid = "A first line.\nA second.\n\nAnother document."
    (workplace / "valid.txt").write_text(f"{valid}\n")
    prepared = _prepare(_recipe(workplace, valid=[f"{workplace}/valid.txt"]))
    assert _document(prepared.train, prepared.tokenizer) == (workplace / "text.txt").read_text().rstrip("\n")
    assert set(prepared.train.lengths[:-1].tolist()) == {30}
    assert _document(prepared.valid, prepared.tokenizer) == valid


def test_rows_are_trained_on_or_held_out_and_those_on_both_sides_of_held_out_ones_are_not_joined(workplace):
    prepared = _prepare(_recipe(workplace))
    whole = (workplace / "text.txt").read_text()
    blocks = [_document(dataset, prepared.tokenizer).split("\n\n") for dataset in (prepared.train, prepared.valid)]
    assert all(block in whole for block in itertools.chain(*blocks))
    train, valid = ([line for block in side for line in block.split("\n")] for side in blocks)
    assert sorted(train + valid) == sorted(whole.splitlines())
    assert 10 <= len(valid) <= 60


def test_at_least_one_row_is_held_out_of_a_small_corpus_and_one_row_cannot_be_split(workplace):
    (workplace / "rows.txt").write_text("CCO\nCCN\nCCC\n")
    recipe = _recipe(workplace, train=[f"{workplace}/rows.txt"], valid_fraction=0.001, sample_break="line")
    prepared = _prepare(recipe)
    assert (len(prepared.train), len(prepared.valid)) == (2, 1)
    (workplace / "rows.txt").write_text("CCO")
    with pytest.raises(DataError, match=r"rows\.txt: too few usable rows") as caught:
        _prepare(recipe)
    assert "`data.valid`" in caught.value.hint


@pytest.mark.parametrize(("name", "kind"), [("grammar", "text"), ("molecules", "smiles")])
def test_bundled_data_is_the_same_for_every_seed_and_has_its_own_validation_rows(workplace, name, kind):
    data = {"kind": kind, "train": [f"bundled:{name}"], "bundled_rows": 60, "sequence_length": 128}
    recipe = _recipe(workplace, **data, valid=[f"bundled:{name}"], sample_break="line")
    prepared = _prepare(recipe)
    assert _texts(prepared.train, prepared.tokenizer) != _texts(prepared.valid, prepared.tokenizer)
    assert _prepare(recipe.model_copy(update={"seed": 99})).fingerprint == prepared.fingerprint


def test_a_second_run_reads_nothing_anew(workplace):
    first = _prepare(_recipe(workplace))
    progress = Recorder()
    second = _prepare(_recipe(workplace), progress)
    assert (first.was_cached, second.was_cached) == (False, True)
    assert second.fingerprint == first.fingerprint == first.train.fingerprint
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert (progress.bars, progress.said) == ([], [])
    (workplace / "text.txt").rename(workplace / "moved.txt")
    assert _prepare(_recipe(workplace, train=[f"{workplace}/moved.txt"])).was_cached


def test_every_option_that_matters_gives_other_shards(workplace):
    """Another length keeps the tokenizer, and an option of SMILES alone changes nothing of text."""
    recipe = _recipe(workplace, valid=[str(valid := workplace / "valid.txt")])
    valid.write_text("One text. " * 20)
    fingerprints = [_prepare(recipe).fingerprint]
    valid.write_text("Another text. " * 20)
    fingerprints.append(_prepare(recipe).fingerprint)
    changes: list[dict[str, Any]] = [
        {}, {"sequence_length": 24}, {"sample_break": "line"}, {"valid_fraction": 0.2}, {"max_rows": 100},
        {"tokenizer": {"vocab_size": 290}}, {"tokenizer": {"train_rows": 50}},
        {"valid": ["bundled:grammar"], "bundled_rows": 20},
    ]  # fmt: skip
    for change in changes:
        progress = Recorder()
        prepared = _prepare(_recipe(workplace, **change), progress)
        assert not prepared.was_cached
        fingerprints.append(prepared.fingerprint)
        if "sequence_length" in change:
            assert [bar.label for bar in progress.bars] == ["tokenising"]
    fingerprints += [_prepare(_smiles(workplace, num_spellings=num)).fingerprint for num in (1, 2, 3)]
    assert len(set(fingerprints)) == len(fingerprints)
    assert _prepare(_recipe(workplace, canonical_smiles=False)).fingerprint == fingerprints[2]


DAMAGE: dict[str, Callable[[Path], None]] = {
    "train/tokens.bin": lambda path: os.truncate(path, 10),
    "prepared.json": Path.unlink,
    "rejected.csv": Path.unlink,
}


def test_damaged_shards_are_named_and_made_again(workplace):
    first = _prepare(_recipe(workplace))
    (directory,) = (workplace / "cache" / "shards").iterdir()
    for name, damage in DAMAGE.items():
        whole, progress = (directory / name).read_bytes(), Recorder()
        damage(directory / name)
        again = _prepare(_recipe(workplace), progress)
        assert (again.was_cached, again.fingerprint) == (False, first.fingerprint)
        assert (directory / name).read_bytes() == whole
        assert progress.said[0].startswith(str(directory))


def test_a_tokenizer_of_the_other_kind_is_refused(workplace):
    _prepare(_smiles(workplace)).tokenizer.save(workplace / "smiles.json")
    with pytest.raises(TokenizerError, match=r"smiles\.json: .* `WordPiece`, but `data\.kind` is text") as caught:
        _prepare(_recipe(workplace, tokenizer={"path": f"{workplace}/smiles.json"}))
    assert "`exlm tokenize`" in caught.value.hint


def _latin_tokenizer(path: Path) -> dict[str, Any]:
    """Save a BPE of the letters a and b, which is not byte-level, and return the section that gives it."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, "a", "b"])}
    Tokenizer(tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]")), "text").save(path)
    return {"path": str(path)}


def test_text_of_tokens_outside_the_vocabulary_alone_is_refused_as_a_line_and_left_out_of_packed_text(workplace):
    """Nothing of it can be masked: a step of such sequences has no loss. Thirty tokens fill a sequence."""
    tokenizer, path = _latin_tokenizer(workplace / "latin.json"), workplace / "rows.txt"
    path.write_text("abc\nccc\n" + "ab\n" * 20)
    options = {"tokenizer": tokenizer, "train": [str(path)], "valid": [str(workplace / "valid.txt")]}
    (workplace / "valid.txt").write_text("ab\n")
    with pytest.raises(DataError, match=r"rows\.txt:2: `ccc`: none of its tokens is in the vocabulary"):
        _prepare(_recipe(workplace, sample_break="line", **options))
    skipped = _prepare(_recipe(workplace, sample_break="line", on_invalid="skip", **options))
    assert (skipped.num_rejected, len(skipped.train)) == (1, 21)
    # a row between others is context; the second and third sequence hold nothing else
    path.write_text("ab" * 15 + "c" * 60 + "ab" * 15 + "\n")
    progress = Recorder()
    packed = _prepare(_recipe(workplace, **options), progress)
    assert packed.train.tokens.tolist() == [5, 6] * 30
    assert progress.said == ["[UNK] replaces 60 tokens outside the vocabulary; 2 sequences of nothing else left out"]
    path.write_text("ccc\nddd\n\n" * 30)
    with pytest.raises(DataError, match=r"rows\.txt: none of its tokens is in the vocabulary") as caught:
        _prepare(_recipe(workplace, **options))
    assert "`--set tokenizer.path=FILE`" in caught.value.hint


def test_skipped_rows_are_listed_now_and_on_every_later_run(workplace):
    path = workplace / "mols.smi"
    path.write_text("CCO\nC1CC\n" + "C" * 40 + "\nCXC\n" + "\n".join(MOLECULES))
    listed = [
        ["file", "row", "reason", "text"],
        [str(path), "2", "RDKit cannot parse it: it breaks the SMILES grammar", "C1CC"],
        [str(path), "4", "characters that are not SMILES tokens: 'X' at position 2", "CXC"],
        [str(path), "3", "40 tokens, but `data.sequence_length` leaves room for 30", "C" * 40],
    ]
    for was_cached in (False, True):
        progress = Recorder()
        prepared = _prepare(_smiles(workplace, on_invalid="skip"), progress)
        assert (prepared.num_rejected, prepared.was_cached) == (3, was_cached)
        assert progress.said[-1] == f"skipped 3 rows, listed in {workplace}/rejected.csv"
        with (workplace / "rejected.csv").open(newline="") as file:
            assert list(csv.reader(file)) == listed
    # where nothing is skipped, the list of an earlier run goes
    path.write_text("\n".join(MOLECULES))
    _prepare(_smiles(workplace, on_invalid="skip"))
    assert not (workplace / "rejected.csv").exists()


def test_molecules_are_read_canonical_without_map_numbers_unless_they_are_wanted_as_written(workplace):
    written = ["OCC", "C1=CC=CC=C1", "[CH3:1][CH2:2][OH:7]", "OC(=O)C", "N#CC"]
    (workplace / "mols.smi").write_text("\n".join(written))
    (workplace / "valid.smi").write_text("C(C)O\n")
    valid = [f"{workplace}/valid.smi"]
    canonical = _prepare(_smiles(workplace, valid=valid))
    assert _texts(canonical.train, canonical.tokenizer) == ["CCO", "c1ccccc1", "CCO", "CC(=O)O", "CC#N"]
    assert _texts(canonical.valid, canonical.tokenizer) == ["CCO"]
    as_written = _prepare(_smiles(workplace, valid=valid, canonical_smiles=False))
    assert _texts(as_written.train, as_written.tokenizer) == written
    assert as_written.fingerprint != canonical.fingerprint


def _spelled(prepared: PreparedData) -> tuple[list[str], list[str], list[str]]:
    assert prepared.spellings is not None
    train, valid, spellings = (
        _texts(dataset, prepared.tokenizer) for dataset in (prepared.train, prepared.valid, prepared.spellings)
    )
    return train, valid, spellings


def test_each_training_molecule_is_read_in_all_its_spellings_and_each_validation_molecule_in_two(workplace):
    """Validation has the canonical SMILES of a run without spellings, and apart from them another one of each."""
    canonical = _prepare(_smiles(workplace, valid_fraction=0.4))
    train, valid, spellings = _spelled(_prepare(_smiles(workplace, valid_fraction=0.4, num_spellings=4)))
    of_train = _texts(canonical.train, canonical.tokenizer)
    assert train == [text for smiles in of_train for text in (smiles, *other_spellings(smiles, 4))]
    assert valid == _texts(canonical.valid, canonical.tokenizer)
    assert spellings == [other_spellings(smiles, 4)[0] for smiles in valid if other_spellings(smiles, 4)]
    assert len(spellings) >= 2


@pytest.mark.parametrize(("fraction", "num_spellings"), [(0.3, 3), (1e-9, 1)])
def test_a_molecule_is_on_one_side_in_whatever_file_and_spelling_it_comes(workplace, fraction, num_spellings):
    """With the small fraction the hashes choose nothing, and the molecule of the smallest one is held out."""
    molecules = [f"{'C' * n}Oc1ccc(F)cc1" for n in range(1, 31)]
    for name, number in (("a.smi", 9), ("b.smi", 10), ("c.smi", 11)):
        written = [Chem.MolToRandomSmilesVect(Chem.MolFromSmiles(smiles), 1, number)[0] for smiles in molecules]
        (workplace / name).write_text("\n".join(written[:: 1 if number < 11 else -1]) + "\n")
    data = {"valid_fraction": fraction, "num_spellings": num_spellings, "sequence_length": 64}
    prepared = _prepare(_smiles(workplace, train=[f"{workplace}/{name}.smi" for name in "abc"], **data))
    train, valid = (
        [Chem.CanonSmiles(text) for text in _texts(dataset, prepared.tokenizer)]
        for dataset in (prepared.train, prepared.valid)
    )
    assert set(train).isdisjoint(valid)
    assert set(train) | set(valid) == {Chem.CanonSmiles(smiles) for smiles in molecules}
    assert len(valid) == 3 * len(set(valid)) > 0
    assert (fraction < 0.1) == (len(set(valid)) == 1)


def test_the_tokenizer_is_trained_on_all_spellings(workplace):
    """Half of them turn the stereocentre round."""
    (workplace / "mols.smi").write_text("\n".join(["C[C@@H](F)Cl", "CCO", "CCN"]) + "\n")
    valid = [f"{workplace}/mols.smi"]
    alone = _prepare(_smiles(workplace, valid=valid)).tokenizer
    mixed = _prepare(_smiles(workplace, valid=valid, num_spellings=9)).tokenizer
    assert [len(alone.encode(text)) for text in ("[C@@H]", "[C@H]")] == [1, 5]
    assert [len(mixed.encode(text)) for text in ("[C@@H]", "[C@H]")] == [1, 1]


def test_spellings_that_do_not_fit_are_left_out_and_counted_and_a_row_that_does_not_is_skipped_whole(workplace):
    chain, branched = f"{'C' * 10}O", "CC(C)C(C)(C)C"  # 11 and 13 tokens; begun in the middle, a chain has 13
    num = 60  # the chain is written from its other end too
    (workplace / "mols.smi").write_text("\n".join([chain, branched, *MOLECULES]) + "\n")
    progress = Recorder()
    data = {"valid": [f"{workplace}/mols.smi"], "on_invalid": "skip", "sequence_length": 14}
    prepared = _prepare(_smiles(workplace, num_spellings=num, **data), progress)
    train, valid, spellings = _spelled(prepared)
    assert train[:3] == [chain, chain[::-1], "CCO"]
    assert valid == [chain, *MOLECULES]
    assert spellings == [chain[::-1], *(other for one in MOLECULES for other in other_spellings(one, num)[:1])]
    assert prepared.num_rejected == 2  # `branched` in both inputs
    num_left_out = len(other_spellings(chain, num)) - 1
    said = f"{num_left_out} spellings left out, of more tokens than `data.sequence_length` leaves room for"
    assert progress.said.count(said) == 2


def test_null_rows_are_skipped_and_listed_and_do_not_stop_a_run(workplace):
    """The first row too, which is looked at before the others; an empty text is neither."""
    row = '{"text": "It rains."}'
    path = workplace / "rows.jsonl"
    path.write_text("\n".join(["null", row, "", '{"text": ""}', '{"text": null}', row]))
    recipe = _recipe(workplace, on_invalid="error", train=[str(path), f"{workplace}/text.txt"])
    assert _prepare(recipe).num_rejected == 3
    with (workplace / "rejected.csv").open(newline="") as file:
        found = [cells[1:3] for cells in csv.reader(file)][1:]
    assert found == [["1", "is null"], ["3", "the line is empty"], ["5", "is null"]]


@pytest.mark.parametrize(
    ("split", "kind", "name", "content", "first"),
    [
        ("train", "smiles", "a.smi", "C1\n", "2 rows skipped, the first: {path}:1: `C1`: RDKit"),
        ("valid", "text", "a.jsonl", '{"text": 3}\n{broken\n', "5 rows skipped, the first: {path}:1: `3`: "),
    ],
)
def test_no_usable_row_is_an_error_with_the_first_reason(workplace, split, kind, name, content, first):
    path, other = workplace / name, workplace / f"b{name}"
    path.write_text(content)
    other.write_text(f"{content}\n")
    own = {"text": "text.txt", "smiles": "mols.smi"}[kind]
    inputs = {"train": [f"{workplace}/{own}"], split: [str(path), str(other)]}
    said = f"`data.{split}`: no usable row in {path} and 1 more; {first.format(path=path)}"
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        _prepare(_recipe(workplace, kind=kind, on_invalid="skip", **inputs))
    assert ("`--set data.column=NAME`" in caught.value.hint) == (kind == "text")
    assert not list((workplace / "cache" / "shards").iterdir())


def test_a_file_without_the_column_is_refused_before_any_other_is_read(workplace):
    good, bad, progress = workplace / "a.jsonl", workplace / "b.jsonl", Recorder()
    good.write_text('{"text": "a good row"}\n' * 30)
    bad.write_text('{"body": "a"}\n')
    with pytest.raises(DataError, match=rf"{bad}.*`text`.*`body`"):
        _prepare(_recipe(workplace, column="text", train=[str(good), str(bad)]), progress)
    assert not progress.bars


@pytest.mark.parametrize("label", ["training the tokenizer", "tokenising"])
def test_an_input_that_changes_while_it_is_read_is_an_error_and_nothing_of_it_is_kept(workplace, label):
    class Changing(SilentProgress):
        def bar(self, shown: str, total: int | None, *, done: int = 0) -> AbstractContextManager[Bar]:
            if shown == label:
                (workplace / "text.txt").write_text("Something else.\n" * 30)
            return super().bar(shown, total, done=done)

    with pytest.raises(DataError, match=r"text\.txt: it changed"):
        _prepare(_recipe(workplace), Changing())
    kept = "shards" if label == "tokenising" else "tokenizers"
    assert not list((workplace / "cache").glob(f"{kept}/*"))


def test_a_cache_that_may_only_be_read_serves(workplace, monkeypatch):
    _prepare(_recipe(workplace))
    refuse = Mock(side_effect=OSError(30, "Read-only file system"))
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert _prepare(_recipe(workplace)).was_cached
