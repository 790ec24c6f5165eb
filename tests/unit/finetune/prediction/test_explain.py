"""Explanations: atoms have the changes of predictions from which they, or all others, are hidden."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from scipy.special import expit

from exlm_cli.api.run import Run, load
from exlm_cli.data.molecules import atom_spans, descriptors, fingerprints, read_all_atoms
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from exlm_cli.finetune.cells.model import Finetuned, load_finetuned
from exlm_cli.finetune.prediction.explain import explain_molecules
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import EncodedRows, FloatArray
from tests.unit.finetune.finetuned_runs import SMILES, finetune, write_rows
from tests.unit.finetune.synthetic import grow_little


@pytest.fixture(scope="module")
def labels(molecules: Path) -> Finetuned:
    return load_finetuned(molecules, device="cpu")


def changes_by_hand(finetuned: Finetuned, smiles: str, groups: list[list[int]]) -> FloatArray:
    """Return the (G, C) mean of what probabilities lose without each group of places, and gain by it alone."""
    tokenizer = finetuned.tokenizer
    whole = [tokenizer.cls_id, *tokenizer.encode(smiles), tokenizer.sep_id]
    every = {place for group in groups for place in group}

    def predicted(hidden: set[int]) -> FloatArray:
        ids = np.array([tokenizer.mask_id if place in hidden else token for place, token in enumerate(whole)])
        encoded = EncodedRows((ids,), np.zeros((1, 1)))
        by_seed = [runner.predict(encoded, SilentProgress(), "")[0] for runner in finetuned.runners.values()]
        return np.mean(expit(by_seed), axis=0)

    changes = [
        (predicted(set()) - predicted({*group}) + predicted(every - {*group}) - predicted(every)) / 2
        for group in groups
    ]
    return np.stack(changes)


def test_the_change_of_an_atom_is_what_it_takes_away_and_what_it_brings_alone(labels):
    """In CC(=O)O the atoms are tokens 1, 2, 5 and 7: [CLS] C C ( = O ) O [SEP]."""
    run = Run(labels.run, labels, SilentProgress())
    found = run.explain(["CC(=O)O", "not a molecule", "OCC"])
    expected = changes_by_hand(labels, "CC(=O)O", [[1], [2], [5], [7]])
    assert found.names == ("active", "toxic")
    assert found.smiles == ("CC(=O)O", "not a molecule", "CCO"), "the second has no canonical SMILES"
    np.testing.assert_allclose(found.changes[0], expected, rtol=0, atol=1e-6)
    assert found.predicted[0, 0] == pytest.approx(run.predict(["CC(=O)O"]).active_probability[0], abs=1e-6)
    assert [len(changes) for changes in found.changes] == [4, 0, 3]
    assert np.isnan(found.predicted[1]).all()
    assert [bool(problem) for problem in found.problems] == [False, True, False]
    assert run.explain(["not a molecule"]).changes[0].shape == (0, 2)


def test_atoms_of_one_token_share_its_change_and_an_atom_of_several_masks_all(labels):
    """A vocabulary with the token CC, in which [nH] is three tokens: [CLS] CC O [ nH ] [SEP]."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, "C", "CC", "O", "[", "nH", "]"))}
    vocabulary |= {letter: len(vocabulary) + index for index, letter in enumerate("nH")}
    merges = [("C", "C"), ("n", "H")]
    own = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="[UNK]")), "smiles")
    finetuned = replace(labels, tokenizer=own)
    encoded = EncodedRows((np.array([own.cls_id, *own.encode("CCO[nH]"), own.sep_id]),), np.zeros((1, 2)))
    (found,) = explain_molecules(finetuned, encoded, ["CCO[nH]"], "model", SilentProgress())
    shared, oxygen, nitrogen = changes_by_hand(finetuned, "CCO[nH]", [[1], [2], [3, 4, 5]])
    np.testing.assert_allclose(found.changes, [shared / 2, shared / 2, oxygen, nitrogen], rtol=0, atol=1e-6)


def test_descriptors_are_those_of_the_molecule_without_its_hidden_atoms(smiles_model, tmp_path):
    """Here the encoder's part of the head is zero, so that descriptors alone predict. A column of numbers stays."""
    kinds = ["ecfp4", "rdkit2d"]
    rows = [[smiles, str(len(smiles) + index % 2), str(index)] for index, smiles in enumerate(SMILES * 4)]
    table = write_rows(tmp_path / "table.csv", ["smiles", "value", "day"], rows)
    task = {"name": "csv", "files": {"train": str(table)}, "smiles_column": "smiles", "label_columns": ["value"]}
    run = finetune(tmp_path, smiles_model, split="random", descriptors=kinds, descriptor_columns=["day"], **task)
    finetuned = load_finetuned(run, device="cpu")
    for runner in finetuned.runners.values():
        for parameter in runner.model.head.dense.parameters():
            parameter.data.zero_()

    def predicted(smiles: str) -> FloatArray:
        numbers = np.concatenate([fingerprints([smiles]), descriptors([smiles], SilentProgress()), [[7.0]]], axis=1)
        encoded = EncodedRows((np.array([finetuned.tokenizer.cls_id] * 2),), np.zeros((1, 1)), descriptors=numbers)
        by_seed = [np.array(runner.predict(encoded, SilentProgress(), "")) for runner in finetuned.runners.values()]
        return np.mean(by_seed, axis=0)[0, 0]

    found = Run(run, finetuned, SilentProgress()).explain(["CCO"], columns={"day": [7]})
    whole, empty = predicted("CCO"), predicted("***")
    assert found.predicted[0, 0] == pytest.approx(whole, rel=1e-5)
    expected = [
        (whole - predicted(without) + predicted(alone) - empty) / 2
        for without, alone in (("*CO", "C**"), ("C*O", "*C*"), ("CC*", "**O"))
    ]
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(found.changes[0][:, 0], expected, rtol=0, atol=1e-4)


def test_what_predicts_is_explained_by_its_own_predictions_without_the_atoms(smiles_model, tmp_path, monkeypatch):
    """A baseline predicts molecules with unknown atoms as it predicts any; the other half of `both` is the model."""
    grow_little(monkeypatch)
    rows = [[smiles, str(len(smiles) + 3 * ("O" in smiles))] for smiles in SMILES * 4]
    table = write_rows(tmp_path / "table.csv", ["smiles", "value"], rows)
    task = {"name": "csv", "files": {"train": str(table)}, "label_columns": ["value"], "split": "random"}
    run = load(finetune(tmp_path, smiles_model, (1,), baseline=True, num_replicates=2, **task))

    def of_baseline(smiles: list[str]) -> FloatArray:
        return run.predict(smiles, predictor="baseline").value_predicted.to_numpy()

    whole, without, alone = of_baseline(["CCO"]), of_baseline(["*CO", "C*O", "CC*"]), of_baseline(["C**", "*C*", "**O"])
    expected = (whole - without + alone - of_baseline(["***"])) / 2
    of_both = (expected + run.explain(["CCO"], predictor="model").changes[0][:, 0]) / 2
    for predictor, changes in (("baseline", expected), ("both", of_both)):
        found = run.explain(["CCO"], predictor=predictor)
        assert found.predicted[0, 0] == pytest.approx(run.predict(["CCO"], predictor=predictor).value_predicted[0])
        assert changes.argmax() == 2
        np.testing.assert_allclose(found.changes[0][:, 0], changes, rtol=0, atol=1e-6)


def test_atoms_beyond_the_sequence_have_no_change(labels):
    """Sequences have 24 tokens: 22 of 30 carbons."""
    (found,) = Run(labels.run, labels, SilentProgress()).explain(["C" * 30]).changes
    assert np.isnan(found).all(axis=1).tolist() == [False] * 22 + [True] * 8


@pytest.mark.parametrize(
    ("smiles", "atoms"),
    [
        ("CC(=O)Oc1ccccc1", ["C", "C", "O", "O", *"cccccc"]),
        ("C[C@@H](Br)C%10CCCCC%10Cl", ["C", "[C@@H]", "Br", *"CCCCCC", "Cl"]),
        ("[Na+].[O-]c1cn[nH]c1", ["[Na+]", "[O-]", "c", "c", "n", "[nH]", "c"]),
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
