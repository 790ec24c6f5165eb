"""Explanations: every atom's tokens are masked in turn, and the change of the prediction is the atom's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from scipy.special import log_softmax

from exlm_cli.api import Run, load
from exlm_cli.data.molecules import atom_spans, read_all_atoms
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.finetune.explain import explain_molecules
from exlm_cli.finetune.model import Finetuned, load_finetuned
from exlm_cli.finetune.predict import predict
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import EncodedRows, FloatArray
from tests.unit.finetune.finetuned_runs import SMILES, finetune, words_run, write_rows


@pytest.fixture(scope="module")
def labels(molecules: Path) -> Finetuned:
    return load_finetuned(molecules, device="cpu")


@pytest.fixture(scope="module")
def three_classes(smiles_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finetuned:
    folder = tmp_path_factory.mktemp("classes")
    rows = [[smiles, ("low", "middle", "high")[index % 3]] for index, smiles in enumerate(SMILES * 4)]
    table = write_rows(folder / "grades.csv", ["smiles", "grade"], rows)
    task = {"name": "csv", "files": {"train": str(table)}, "smiles_column": "smiles", "label_columns": ["grade"]}
    return load_finetuned(finetune(folder, smiles_model, split="random", **task), device="cpu")


def outputs(finetuned: Finetuned, sequences: list[list[int]]) -> FloatArray:
    """Return the (K, V, C) outputs of the seeds for token sequences."""
    encoded = EncodedRows(tuple(map(np.array, sequences)), np.zeros((len(sequences), 1)))
    return np.array([runner.predict(encoded, SilentProgress(), "") for runner in finetuned.runners.values()])


def masked_one_by_one(finetuned: Finetuned, smiles: str, places: list[list[int]]) -> list[list[int]]:
    """Return the sequence of a SMILES, and those with the tokens at each of some places masked."""
    tokenizer = finetuned.tokenizer
    whole = [tokenizer.cls_id, *tokenizer.encode(smiles), tokenizer.sep_id]
    return [whole, *([tokenizer.mask_id if i in hidden else t for i, t in enumerate(whole)] for hidden in places)]


def test_the_change_of_an_atom_is_that_of_the_logits_when_its_token_is_masked(labels):
    """In CC(=O)O the atoms are tokens 1, 2, 5 and 7: [CLS] C C ( = O ) O [SEP]."""
    found = Run(labels.run, labels, SilentProgress()).explain(["CC(=O)O", "not a molecule", "OCC"])
    expected = outputs(labels, masked_one_by_one(labels, "CC(=O)O", [[1], [2], [5], [7]])).mean(axis=0)
    assert found.names == ("active", "toxic")
    assert found.smiles == ("CC(=O)O", "not a molecule", "CCO"), "the second has no canonical SMILES"
    np.testing.assert_allclose(found.changes[0], expected[0] - expected[1:], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.predicted[0], expected[0], rtol=0, atol=1e-6)
    assert [len(changes) for changes in found.changes] == [4, 0, 3]
    assert np.isnan(found.predicted[1]).all()
    assert [bool(problem) for problem in found.problems] == [False, True, False]


def test_the_changes_of_classes_are_log_odds(three_classes):
    (found,) = Run(three_classes.run, three_classes, SilentProgress()).explain(["CCO"]).changes
    log_p = log_softmax(outputs(three_classes, masked_one_by_one(three_classes, "CCO", [[1], [2], [3]])), axis=-1)
    log_odds = (log_p - np.log1p(-np.exp(log_p))).mean(axis=0)
    np.testing.assert_allclose(found, log_odds[0] - log_odds[1:], rtol=0, atol=1e-5)


def test_atoms_of_one_token_share_its_change_and_an_atom_of_several_masks_all(labels):
    """A vocabulary with the token CC, in which [nH] is three tokens: [CLS] CC O [ nH ] [SEP]."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, "C", "CC", "O", "[", "nH", "]"))}
    vocabulary |= {letter: len(vocabulary) + index for index, letter in enumerate("nH")}
    merges = [("C", "C"), ("n", "H")]
    own = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="[UNK]")), "smiles")
    finetuned = replace(labels, tokenizer=own)
    sequences = masked_one_by_one(finetuned, "CCO[nH]", [[1], [2], [3, 4, 5]])
    encoded = EncodedRows((np.array(sequences[0]),), np.zeros((1, 2)))
    (found,) = explain_molecules(finetuned, encoded, ["CCO[nH]"], SilentProgress())
    whole, shared, oxygen, nitrogen = outputs(finetuned, sequences).mean(axis=0)
    expected = [(whole - shared) / 2, (whole - shared) / 2, whole - oxygen, whole - nitrogen]
    np.testing.assert_allclose(found.changes, expected, rtol=0, atol=1e-6)


def test_atoms_beyond_the_sequence_have_no_change(labels):
    """Sequences have 24 tokens: 22 of 30 carbons."""
    (found,) = Run(labels.run, labels, SilentProgress()).explain(["C" * 30]).changes
    assert np.isnan(found).all(axis=1).tolist() == [False] * 22 + [True] * 8


def test_text_and_pretrained_runs_are_refused(text_model, smiles_model, tmp_path):
    words = load_finetuned(words_run(tmp_path, text_model, "length"), device="cpu")
    with pytest.raises(ConfigError, match="reads text"):
        Run(words.run, words, SilentProgress()).explain(["amber fern"])
    with pytest.raises(ConfigError, match="reads text"):
        predict(words, tmp_path / "words.csv", None, folder=tmp_path, explain=lambda *_: {}, progress=SilentProgress())
    assert not list(tmp_path.glob("predictions*"))
    with pytest.raises(CheckpointError, match="predicts no labels"):
        load(smiles_model, device="cpu").explain(["CCO"])


def test_the_files_of_explanations_come_with_the_predictions_or_not_at_all(labels, tmp_path):
    table = write_rows(tmp_path / "new.csv", ["mol"], [[smiles] for smiles in SMILES])
    out = tmp_path / "new" / "out.csv"

    def fail(*_):
        raise ConfigError("the page cannot be drawn", "there is no page")

    with pytest.raises(ConfigError, match="cannot be drawn"):
        predict(labels, table, out, folder=tmp_path, explain=fail, progress=SilentProgress())
    assert not out.parent.exists()
    summary = predict(
        labels,
        table,
        out,
        folder=tmp_path,
        explain=lambda encoded, rows, folder: {folder / "index.html": str(len(encoded)).encode()},
        progress=SilentProgress(),
    )
    assert summary.files == (out, out.with_name("out-atoms") / "index.html")
    assert (out.with_name("out-atoms") / "index.html").read_text() == str(len(SMILES))


@pytest.mark.parametrize(
    ("smiles", "atoms"),
    [
        ("CC(=O)Oc1ccccc1", ["C", "C", "O", "O", *"cccccc"]),
        ("C[C@@H](Br)C%10CCCCC%10Cl", ["C", "[C@@H]", "Br", *"CCCCCC", "Cl"]),
        ("[Na+].[O-]c1cn[nH]c1", ["[Na+]", "[O-]", "c", "c", "n", "[nH]", "c"]),
        ("[H]OC", ["[H]", "O", "C"]),
        ("C[Pt](Cl)(Cl)*", ["C", "[Pt]", "Cl", "Cl", "*"]),
    ],
)
def test_atoms_are_those_that_a_smiles_names_in_the_order_of_rdkit(smiles, atoms):
    assert [smiles[start:end] for start, end in atom_spans(smiles)] == atoms
    molecule = read_all_atoms(smiles)
    assert molecule is not None
    symbols = [atom.GetSymbol().lower() for atom in molecule.GetAtoms()]
    assert len(symbols) == len(atoms)
    assert all(symbol in atom.lower() for symbol, atom in zip(symbols, atoms, strict=True))


def test_what_is_no_molecule_has_no_atoms_to_draw():
    assert read_all_atoms("C1CC") is None
