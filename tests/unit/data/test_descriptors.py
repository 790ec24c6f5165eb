"""Descriptors are those of RDKit, from this process and from others; no molecule has no number and no fingerprint."""

import numpy as np
import pytest
from rdkit import Chem
from rdkit.Chem.Descriptors import descList

from exlm_cli.data import descriptors as descriptors_module
from exlm_cli.data.descriptors import descriptors, fingerprints
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import FloatArray

SMILES = ["CCO", "c1ccccc1C(=O)N", "C[C@H](N)C(=O)O", "[Na+].[Cl-]"]


def by_hand(smiles: str) -> FloatArray:
    molecule = Chem.MolFromSmiles(smiles)
    return np.array([function(molecule) for _, function in descList], dtype=np.float64)


@pytest.mark.parametrize("chunk_rows", [64, 1])
def test_they_are_those_of_rdkit_whichever_process_works_them_out(monkeypatch, chunk_rows):
    monkeypatch.setattr(descriptors_module, "SLOW_CHUNK_ROWS", chunk_rows)
    smiles_of_rows = 2 * SMILES
    found = descriptors(smiles_of_rows, SilentProgress())
    assert (found.dtype, found.shape) == (np.float32, (8, len(descList)))
    for row, smiles in zip(found, smiles_of_rows, strict=True):
        np.testing.assert_allclose(row, by_hand(smiles), rtol=1e-6)


def test_what_is_no_molecule_has_no_value_and_what_is_too_large_the_largest():
    """`Ipc` of a chain grows like the powers of a number: that of 300 carbons is above 3.4e38."""
    found = descriptors(["CCO", "no molecule", "C" * 300], SilentProgress())
    assert np.isnan(found[1]).all()
    assert not np.isnan(found[0]).any()
    ipc = [name for name, _ in descList].index("Ipc")
    assert found[2, ipc] == np.finfo(np.float32).max
    assert not np.isinf(found).any()


def test_fingerprints_of_what_is_no_molecule_are_refused():
    assert np.array_equal(fingerprints(["OCC", "[CH3:1]CO"])[0], fingerprints(["CCO"])[0])
    with pytest.raises(DataError, match="no fingerprint of `C1CC`: RDKit cannot parse it"):
        fingerprints(["CCO", "C1CC"])
