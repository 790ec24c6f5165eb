"""Records of SDF are those of RDKit's own reader: molecules with their stereochemistry, titles and properties."""

import gzip
import io
from pathlib import Path

import pytest
from rdkit import Chem
from rdkit.Chem import AllChem

from exlm_cli.data.rows.records import ColumnChoice, iter_file_rows, iter_records
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.rows.table import read_input_rows, read_table

SMILES = ["CCO", "C[C@H](N)C(=O)O", "F/C=C\\F", "[13CH4]", "c1ccc2[nH]ccc2c1", "[NH3+]CC([O-])=O.[Na+].[Cl-]"]


def write_sdf(path: Path, smiles: list[str], *, is_v3000: bool = False, has_3d: bool = False) -> Path:
    """Write molecules with a title and, of every other one, a property."""
    text = io.StringIO()
    with Chem.SDWriter(text) as writer:
        writer.SetForceV3000(is_v3000)
        for number, one in enumerate(smiles):
            molecule = Chem.AddHs(Chem.MolFromSmiles(one)) if has_3d else Chem.MolFromSmiles(one)
            if has_3d:
                AllChem.EmbedMolecule(molecule, randomSeed=0)
            else:
                AllChem.Compute2DCoords(molecule)
            molecule.SetProp("_Name", f"M{number}")
            molecule.SetProp("ID", f"CMP-{number}")
            if number % 2:
                molecule.SetProp("IC50 (nM)", f">{number}.5")
                molecule.SetProp("remark", "two\nlines")
            writer.write(molecule)
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize(("name", "is_v3000", "has_3d"), [
    ("a.sdf", False, False),
    ("a.sdf", True, False),
    ("a.sdf.gz", False, True),
])  # fmt: skip
def test_records_are_those_of_rdkit(tmp_path, name, is_v3000, has_3d):
    path = write_sdf(tmp_path / name, SMILES, is_v3000=is_v3000, has_3d=has_3d)
    content = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    table = read_table(path)
    theirs = list(Chem.ForwardSDMolSupplier(io.BytesIO(content)))
    assert [*table.columns["smiles"]] == [Chem.CanonSmiles(smiles) for smiles in SMILES]
    assert [*table.columns] == ["smiles", "title", "ID", "IC50 (nM)", "remark"]
    for column in ("ID", "IC50 (nM)", "remark"):
        told = [molecule.GetProp(column) if molecule.HasProp(column) else "" for molecule in theirs]
        assert [*table.columns[column]] == told
    assert [*table.columns["title"]] == [molecule.GetProp("_Name") for molecule in theirs]
    lines = content.decode().splitlines()
    assert [lines[line - 1] for line in table.lines] == [*table.columns["title"]]
    with path.open("rb") as raw:
        assert [row.text for row in iter_file_rows(path, raw, ColumnChoice("smiles"))] == [*table.columns["smiles"]]


def test_what_rdkit_refuses_has_a_reason_and_its_line(tmp_path):
    """A valence of five, and a molfile that is cut off; the others are read."""
    path = write_sdf(tmp_path / "a.sdf", ["CCO", "CC(C)(C)C", "CCN"])
    blocks = path.read_text().split("$$$$\n")
    blocks[1] = blocks[1].replace(" C   0", " N   0")
    blocks[2] = blocks[2].replace("  3  2  0", "  9  2  0")
    path.write_text("$$$$\n".join(blocks))
    rows = read_input_rows(path, "smiles", SilentProgress())
    assert (rows.problems[0], "valence" in rows.problems[1], bool(rows.problems[2])) == ("", True, True)
    assert rows.table.where(1).endswith(f":{1 + blocks[0].count(chr(10)) + 1}")


def test_a_racemate_is_not_read_as_one_enantiomer(tmp_path):
    molecule = Chem.MolFromSmiles("C[C@H](N)O |&1:1|")
    AllChem.Compute2DCoords(molecule)
    (tmp_path / "a.sdf").write_text(Chem.MolToV3KMolBlock(molecule) + "$$$$\n")
    rows = read_input_rows(tmp_path / "a.sdf", "smiles", SilentProgress())
    assert "CXSMILES" in rows.problems[0]


def test_properties_with_the_names_of_own_columns_are_kept_beside_them(tmp_path):
    """And the molecule is read from the molfile, whatever other columns are called."""
    path = write_sdf(tmp_path / "a.sdf", ["CCO"])
    path.write_text(path.read_text().replace("$$$$", "> <SMILES>\nCCN\n\n>  <canonical_smiles>\nCCC\n\n$$$$"))
    (record,) = iter_records(path)
    assert (record.values["smiles"], record.values["SMILES (property)"]) == ("CCO", "CCN")
    assert read_input_rows(path, "smiles", SilentProgress()).inputs == ("CCO",)
