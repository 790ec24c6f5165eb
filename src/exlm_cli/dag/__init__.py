"""The DAG behind one masked input: numbers, drawing, and reports."""

from exlm_cli.errors import DataError
from exlm_cli.format import is_unicode, shorten

FORMATS = ("png", "svg", "html", "json")
"""Formats that `report.write_report` writes."""


def check_sentence(text: str, *, is_smiles: bool) -> None:
    """Check that an input has something to predict.

    Raises:
        DataError: It is empty, has no [MASK], or contains a lone surrogate.
    """
    example = "c1ccc([MASK])cc1" if is_smiles else "This is [MASK], and I'm very [MASK] to see this."
    hint = f'write [MASK] for each hidden token, as in: exlm inspect-dag "{example}"'
    if not text.strip():
        raise DataError("the sentence is empty", hint)
    if not is_unicode(text):
        raise DataError(f"{shorten(ascii(text), 60)} contains a lone surrogate", hint)
    if "[MASK]" not in text:
        raise DataError(f"there is no [MASK] in {shorten(text, 60)!r}", hint)
