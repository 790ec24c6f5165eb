r"""Bundled molecules: well-known ring systems and chains with well-known substituents, as canonical SMILES.

Every core has numbered sites; every substituent is a SMILES piece that begins with the atom that binds. RDKit checks
and canonicalises each product, so the molecules are valid and distinct.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from exlm_cli.errors import DataError

CORES = (
    "c1cc({0})ccc1{1}",  # benzene, para
    "c1cc({0})cc({1})c1{2}",  # benzene, three sites
    "c1cc({0})cnc1{1}",  # pyridine
    "c1nc({0})cc({1})n1",  # pyrimidine
    "c1cc({0})sc1{1}",  # thiophene
    "c1cc({0})oc1{1}",  # furan
    "c1cc2cc({0})[nH]c2cc1{1}",  # indole
    "c1c({0})[nH]c({1})n1",  # imidazole
    "c1ccc2nc({0})cc({1})c2c1",  # quinoline
    "c1cc2c(cc1{0})nc({1})s2",  # benzothiazole
    "C1CN({0})CCN1{1}",  # piperazine
    "C1CC({0})CCN1{1}",  # piperidine
    "C1C[NH+](C)CCC1({0}){1}",  # charged piperidine
    "C1CC({0})CC1{1}",  # cyclopentane
    "C[C@H]({0})C(=O)N{1}",  # alanine amide
    "C[C@@H]({0})C(=O)N{1}",  # its mirror image
    "N[C@@H](C{0})C(=O)N{1}",  # amino acid amide
    "C({0})/C=C/c1ccc({1})cc1",  # styrene, trans
    "C({0})/C=C\\c1ccc({1})cc1",  # styrene, cis
    "C(=O)({0})N{1}",  # amide
    "C({0})S(=O)(=O)N{1}",  # sulfonamide
    "O=C1N({0})C(=O)c2cc({1})ccc21",  # phthalimide
    "c1ccc(C({0})Oc2ccc({1})cc2)cc1",  # benzyl phenyl ether
    "C1CC2CC1CC2({0}){1}",  # norbornane
    "c1cc({0})ccc1C(=O)Nc1ccc({1})c({2})c1",  # benzanilide
)
"""SMILES with sites {0}, {1}, ...; each site takes any substituent."""

_PIECES = r"""
C CC C(C)C C(C)(C)C C%11CC%11 C%11CCCCC%11 CO CCO CCN(C)C CC#N CCCl CCBr C(F)(F)F C(=O)O C(=O)[O-] C(=O)OC C(=O)N
C(=O)C C#N C#C C/C=C/C C/C=C\C CC[NH3+] C[N+](C)(C)C [C@H](C)O [C@@H](C)O [C@H](N)C(=O)O [C@@H](C)CC c%11ccccc%11
c%11ccc(F)cc%11 c%11ccc(Cl)cc%11 c%11ccc(Br)cc%11 c%11ccc(I)cc%11 c%11ccncc%11 c%11ccco%11 c%11cccs%11
c%11c[nH]cn%11 c%11ccc([N+](=O)[O-])cc%11 Cc%11ccccc%11 CCc%11ccc(O)cc%11 CN%11CCOCC%11 CP(=O)(O)O CS(C)(=O)=O CSC
CC(=O)Nc%11ccccc%11
"""

SUBSTITUENTS = tuple(_PIECES.split())
"""SMILES pieces, each bound by a carbon, so that each fits every site."""


def _num_products(core: str) -> int:
    return int(len(SUBSTITUENTS) ** core.count("{"))


def _products(seed: int) -> Iterator[str]:
    """Yield every core with every choice of substituents once, cores in turn, in an order that the seed decides."""
    rng = np.random.Generator(np.random.Philox(seed))
    by_core = [_fill(core, rng.permutation(_num_products(core))) for core in CORES]
    for turn in itertools.zip_longest(*by_core):
        yield from (product for product in turn if product is not None)


def _fill(core: str, order: NDArray[np.int64]) -> Iterator[str]:
    """Yield a core's products; the digits of each number, in base `len(SUBSTITUENTS)`, are the substituents."""
    for number in order.tolist():
        chosen = []
        for _ in range(core.count("{")):
            number, choice = divmod(number, len(SUBSTITUENTS))
            chosen.append(SUBSTITUENTS[choice])
        yield core.format(*chosen)


def generate_molecules(num: int, seed: int) -> list[str]:
    """Return `num` distinct valid molecules as canonical isomeric SMILES; the same for the same seed.

    Raises:
        DataError: There are not that many distinct products.
    """
    from rdkit import Chem, rdBase

    num_products = sum(map(_num_products, CORES))
    distinct: dict[str, None] = {}
    if num <= num_products:
        with rdBase.BlockLogs():
            for product in _products(seed):
                if len(distinct) == num:
                    break
                molecule = Chem.MolFromSmiles(product)
                assert molecule is not None, product
                distinct[Chem.MolToSmiles(molecule)] = None
    if len(distinct) < num:
        raise DataError(
            f"`bundled:molecules` has at most {len(distinct) or num_products:,} distinct molecules, asked for {num:,}",
            f"give `--set data.bundled_rows={len(distinct) or num_products}` or less",
        )
    return list(distinct)
