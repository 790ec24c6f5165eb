"""The seven MoleculeNet sets of Table 1: their columns, their sizes in Table 9, and where they are public.

The public files are pinned to a commit and known to the byte. Those of KANO hold each molecule once and are the rows
that Uni-Mol, and so the paper, split; MUV and ToxCast are DeepChem's own files. DeepChem's other files
(`deepchemdata`, read with `--data-dir`) hold rows besides, which `notes` name.
"""

from dataclasses import dataclass

from exlm_cli.data.download import RemoteFile

_KANO = "https://raw.githubusercontent.com/HICAI-ZJU/KANO/766b478fde816ea014c713f380b73e87cd780da8/data"
_DEEPCHEM = "https://raw.githubusercontent.com/deepchem/deepchem/fbe3b911a94a6eb8c84c1a9e7ac67a472c49ea80"
_TENTHS = "Table 9 prints a tenth, rounded down, for validation and for testing; the rest of the rows is tested on too"


@dataclass(frozen=True)
class MoleculeNetSet:
    """One set.

    Attributes:
        name: As in `moleculenet/<name>`.
        file_names: Stems that its file is known by.
        num_labels: How many label columns there are.
        labels: Their names; empty: every column that is neither the molecule nor its identifier.
        remote: Its public home.
        table_9: Molecules of train, valid and test in Table 9.
        known_difference: Why a public file may give a row or two more or less.
    """

    name: str
    file_names: tuple[str, ...]
    num_labels: int
    labels: tuple[str, ...]
    remote: RemoteFile
    table_9: tuple[int, int, int]
    known_difference: str = ""


_TOX21_ASSAYS = (
    "NR-AR", "NR-AR-LBD", "NR-AhR", "NR-Aromatase", "NR-ER", "NR-ER-LBD", "NR-PPAR-gamma", "SR-ARE", "SR-ATAD5",
    "SR-HSE", "SR-MMP", "SR-p53",
)  # fmt: skip

SMILES_COLUMNS = ("smiles", "mol")
"""The first of them that is there is the molecule (DeepChem's BACE calls it `mol`)."""

IDENTIFIER_COLUMNS = ("mol_id",)

MOLECULENET_SETS = {
    found.name: found
    for found in (
        MoleculeNetSet(
            "bace",
            ("bace",),
            1,
            ("Class",),
            RemoteFile(
                f"{_KANO}/bace.csv", "5fb6e2a87a148ec7393c1d874d26ec40ee74eb6223ea7d2bfa16d153eb75eb55", 103_230
            ),
            (1210, 151, 151),
            _TENTHS,
        ),
        MoleculeNetSet(
            "bbbp",
            ("bbbp", "BBBP"),
            1,
            ("p_np",),
            RemoteFile(
                f"{_KANO}/bbbp.csv", "a61e17872cbec0743a6147dc802a1f7550acfe8dc1053f881f4c42a3ce2dc597", 111_265
            ),
            (1631, 204, 204),
        ),
        MoleculeNetSet(
            "clintox",
            ("clintox",),
            2,
            ("FDA_APPROVED", "CT_TOX"),
            RemoteFile(
                f"{_KANO}/clintox.csv", "cc561402d058a0d996a9f5e5d02bc20f6652b7003525b32c3598b8da4b24e9b7", 94_829
            ),
            (1182, 148, 148),
            "Uni-Mol's rows leave out the two cobalt complexes of DeepChem's file",
        ),
        MoleculeNetSet(
            "tox21",
            ("tox21",),
            12,
            _TOX21_ASSAYS,
            RemoteFile(
                f"{_KANO}/tox21.csv", "b58cc1f683e78e3c7a1bf7116e9aac0119804018d100f7b8cdb0857941c31aca", 458_635
            ),
            (6264, 783, 783),
            _TENTHS,
        ),
        MoleculeNetSet(
            "toxcast",
            ("toxcast", "toxcast_data"),
            617,
            (),
            RemoteFile(
                f"{_DEEPCHEM}/examples/toxcast/processing/toxcast_data.csv.gz",
                "56041515e0bb63c1787a26ecdbeb2bd7ae1f538681caa1b03f768853cf81b1a7",
                405_299,
            ),
            (6860, 858, 858),
            "Table 1 counts 8,575 molecules and Table 9 8,576; DeepChem's file has 8,579 that RDKit reads, and which "
            "of them Uni-Mol leaves out is not told",
        ),
        MoleculeNetSet(
            "sider",
            ("sider",),
            27,
            (),
            RemoteFile(
                f"{_KANO}/sider.csv", "87b937d1ddb1879bb14e8f23d94ceffcb9ad3e534ae59602820b3bcf03844fbf", 183_743
            ),
            (1141, 143, 143),
        ),
        MoleculeNetSet(
            "muv",
            ("muv",),
            17,
            (),
            RemoteFile(
                f"{_DEEPCHEM}/datasets/muv.csv.gz",
                "93c8b4a37c5996c76e57d5f3f065fb8b7cf1c19067011eff2293fd2a94ce274a",
                1_749_843,
            ),
            (74469, 9309, 9309),
        ),
    )
}
