"""Molecules with open places: other spellings, means over them, equal molecules together, and those that are none."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from exlm_cli.dag.build import build_dag
from exlm_cli.dag.fillings import n_best_fillings
from exlm_cli.data.molecules import canonical_smiles, parse_molecule
from exlm_cli.fill.engine import FillSettings, fill_texts
from exlm_cli.fill.molecules import ONE_SPELLING, read_molecule, spell
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrained import Pretrained
from tests.tiny import word_level
from tests.unit.fill.models import drawn

TOKENIZER = word_level(["C", "N", "O", "F", "c", "n", "(", ")", "=", "1", "2"])
EVERY = FillSettings(top=1000)


@pytest.fixture(scope="module")
def model() -> Pretrained:
    return drawn(TOKENIZER)


def _canonical(smiles: str) -> str:
    molecule, objection = parse_molecule(smiles)
    return "" if molecule is None or objection else canonical_smiles(molecule)


def _molecules(model: Pretrained, text: str) -> dict[str, float]:
    """Return the probability of each molecule that fills a text, summed over all its fillings."""
    found: dict[str, float] = defaultdict(float)
    every = n_best_fillings(build_dag(model, text), 5000)
    assert every.is_proven
    for filling in every.fillings:
        found[_canonical(filling.text)] += np.exp(filling.log_prob - every.log_prob_length)
    del found[""]
    return found


@pytest.mark.parametrize("text", ["OC(=O)c1ccc([MASK])cc1", "c1cc[MASK]cc1", "C[MASK]C[MASK]N", "[MASK][MASK]O"])
def test_spellings_are_of_the_same_unfinished_molecule(text):
    (first, order), *others = spell(text, 8)
    assert (first, order) == (text, tuple(range(text.count("[MASK]"))))
    assert len(others) > 2
    atoms = ["[13CH2]", "[15NH]"] if text.startswith("C") else ["c", "n"] if "c1cc[" in text else ["C", "N"]
    for spelling, order in others:
        filled, truth = spelling, text
        for mask in order:
            filled = filled.replace("[MASK]", atoms[mask], 1)
        for atom in atoms[: text.count("[MASK]")]:
            truth = truth.replace("[MASK]", atom, 1)
        assert _canonical(filled) == _canonical(truth) != ""


@pytest.mark.parametrize("text", ["C1CC[MASK]", "C[MASK]1CC", "CC(C[MASK]C"])
def test_masks_that_are_no_atoms_are_asked_in_one_spelling(model, text):
    assert spell(text, 8) == [(text, (0,))]
    (row,) = fill_texts(model, [text], FillSettings(top=3, spellings=8), SilentProgress())
    assert not row.lines or ONE_SPELLING in row.notes


@pytest.mark.parametrize("text", ["CC[MASK]C[MASK]", "C([MASK])c1ccccc1"])
def test_equal_molecules_are_one_line_with_the_sum_and_others_are_left_out_unless_kept(model, text):
    truth = _molecules(model, text)
    (row,) = fill_texts(model, [text], EVERY, SilentProgress())
    assert {line.filled: np.exp(line.log_prob) for line in row.lines} == pytest.approx(truth, rel=1e-3)
    (row,) = fill_texts(model, [text], replace(EVERY, keeps_invalid=True), SilentProgress())
    assert {line.filled for line in row.lines if not line.problem} == set(truth)
    kept = [line for line in row.lines if line.problem]
    assert kept
    assert all(read_molecule(line.filled) == (line.filled, line.problem) for line in kept)
    assert sum(np.exp(line.log_prob) for line in row.lines) == pytest.approx(1, abs=1e-3)


def test_a_list_is_as_long_as_asked_although_most_fillings_are_no_molecules(model):
    text = "C[MASK][MASK]c1ccccc1"
    best = sorted(_molecules(model, text).items(), key=lambda item: -item[1])[:6]
    (row,) = fill_texts(model, [text], FillSettings(top=6), SilentProgress())
    assert len(row.lines) == 6
    assert {row.lines[0].filled, row.lines[1].filled} <= {molecule for molecule, _ in best}
    (drawn_row,) = fill_texts(model, [text], FillSettings(samples=6), SilentProgress())
    assert len({line.filled for line in drawn_row.lines}) == 6
    assert all(_canonical(line.filled) == line.filled for line in drawn_row.lines)


def test_several_spellings_give_the_mean_of_their_probabilities(model):
    text = "CC([MASK])C[MASK]"
    spelled = spell(text, 4)
    truth: dict[str, float] = defaultdict(float)
    for spelling, _ in spelled:
        for molecule, probability in _molecules(model, spelling).items():
            truth[molecule] += probability / len(spelled)
    (row,) = fill_texts(model, [text], replace(EVERY, spellings=4), SilentProgress())
    assert {line.filled: np.exp(line.log_prob) for line in row.lines} == pytest.approx(truth, rel=1e-3)
