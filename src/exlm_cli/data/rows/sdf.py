"""Records of SDF: the SMILES, the title and the properties of each molecule; coordinates are dropped."""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from exlm_cli.data.rows import decode

SMILES, TITLE = "smiles", "title"
"""Columns of every SDF; a property with such a name has ` (property)` after it."""

_PROPERTY = re.compile(r">.*?<([^>]+)>")


def read_records(path: Path, file: io.BufferedReader) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line on which each record begins, counted from 1, and its cells by column.

    Records need not have the same properties. Stereochemistry is that of the bonds, or of 3D coordinates, as RDKit
    reads it. A molfile that RDKit cannot read has an empty SMILES; one of a racemate has CXSMILES, as its SMILES alone
    would be one enantiomer.

    Raises:
        DataError: A line is not UTF-8 text.
    """
    begin, block = 1, list[str]()
    for number, line in decode.text_lines(path, file):
        if line.startswith("$$$$"):
            yield begin, _cells(block)
            begin, block = number + 1, []
        else:
            block.append(line.rstrip("\r\n"))
    if any(map(str.strip, block)):
        yield begin, _cells(block)


def _cells(block: Sequence[str]) -> dict[str, str]:
    end = next((place for place, line in enumerate(block) if line.startswith(("M  END", ">"))), len(block))
    found = {SMILES: _smiles("\n".join([*block[:end], "M  END"])), TITLE: block[0].strip() if block else ""}
    name, values = "", list[str]()
    for line in (*block[end:], ""):
        if name and line.strip():
            values.append(line)
        elif name:
            found[name], name, values = "\n".join(values).strip(), "", []
        elif header := _PROPERTY.match(line):
            name = header[1] if header[1].lower() not in (SMILES, TITLE) else f"{header[1]} (property)"
    return found


def _smiles(molfile: str) -> str:
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        # what RDKit refuses is judged as any other SMILES is, with a reason
        molecule = Chem.MolFromMolBlock(molfile) or Chem.MolFromMolBlock(molfile, sanitize=False)
        if molecule is None:
            return ""
        molecule.RemoveAllConformers()
        is_one = all(g.GetGroupType() == Chem.StereoGroupType.STEREO_ABSOLUTE for g in molecule.GetStereoGroups())
        return str(Chem.MolToSmiles(molecule) if is_one else Chem.MolToCXSmiles(molecule))
