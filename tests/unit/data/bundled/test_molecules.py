"""Bundled molecules: RDKit is the judge of validity and of canonical form."""

import pytest
from rdkit import Chem

from exlm_cli.data.bundled import molecules
from exlm_cli.data.bundled.molecules import CORES, SUBSTITUENTS, generate_molecules
from exlm_cli.data.molecules import find_invalid_smiles
from exlm_cli.errors import DataError


def test_molecules_are_distinct_valid_and_canonical():
    generated = generate_molecules(1000, seed=0)
    assert len(set(generated)) == len(generated) == 1000
    assert list(map(Chem.CanonSmiles, generated)) == generated


def test_every_core_takes_every_substituent():
    for core in CORES:
        for substituent in SUBSTITUENTS:
            assert find_invalid_smiles(core.format(*[substituent] * 3)) is None, (core, substituent)


def test_asking_for_more_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(molecules, "CORES", ("C({0}){1}",))
    monkeypatch.setattr(molecules, "SUBSTITUENTS", ("Cl", "Br"))
    # ClCCl, ClCBr (twice), BrCBr
    assert len(generate_molecules(3, seed=0)) == 3
    for asked, most in ((4, 3), (5, 4)):
        with pytest.raises(DataError, match=f"at most {most} distinct molecules, asked for {asked}") as caught:
            generate_molecules(asked, seed=0)
        assert f"`--set data.bundled_rows={most}`" in caught.value.hint
