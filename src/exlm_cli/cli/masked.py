"""Inputs with masks: which run reads them, and whether they are text or SMILES."""

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.cli.runs import choose_checkpoint
from exlm_cli.config.tasks import InputKind
from exlm_cli.data.rows.records import LINE_FORMATS, ColumnChoice, Record, format_of, iter_records
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.format import name_some, shorten
from exlm_cli.progress import Progress

if TYPE_CHECKING:
    from exlm_cli.config.pretrain import PretrainRecipe


def choose_run(checkpoint: Path | None, kind: InputKind | None, progress: Progress) -> Path:
    """Return the run that was given, or the newest of a kind: an ExLM before an MLM, which has no DAG."""
    described = "SMILES run" if kind == "smiles" else "text run"

    def fits(recipe: "PretrainRecipe") -> bool:
        return recipe.data.kind == kind and recipe.masking.num_repeats == 1

    return choose_checkpoint(
        checkpoint,
        {f"{described} of an ExLM": lambda recipe: fits(recipe) and recipe.objective == "exlm", described: fits},
        recipe_to_make_one=f"quickstart-{kind}",
        progress=progress,
    )


def kind_of(sentence: str) -> InputKind | None:
    """Tell SMILES from text by its tokens; None: it could be either.

    A full stop or question mark ends sentences, but no SMILES. A word of aromatic atoms without a ring or a bond is no
    molecule, unless its masks hide these.
    """
    from exlm_cli.data.smiles import SMILES_PATTERN, SMILES_TOKEN
    from exlm_cli.data.tokenizer import MASK, mark_masks

    spelled = mark_masks(sentence.strip(), "text").replace(MASK, "*")
    if re.fullmatch(f"(?:{SMILES_PATTERN})+(?<![.?])", spelled) is None:
        return "text"
    tokens = SMILES_TOKEN.findall(spelled.replace("*", ""))
    has_atoms = any(token[0].isalpha() or token[0] == "[" for token in tokens)
    is_word = all(map(str.isalpha, tokens)) and any(map(str.islower, tokens))
    return "smiles" if has_atoms and not is_word else None


def require_kind(given: str, checkpoint: Path | None, kind: InputKind | None) -> InputKind | None:
    """Return what one input is, as `--kind` says or as it looks; None where the checkpoint decides.

    Raises:
        ConfigError: It could be either, and there is no checkpoint.
    """
    found = kind or kind_of(given)
    if found is None and checkpoint is None:
        raise ConfigError(
            f"{shorten(given, 60)!r} could be text or SMILES", "say which with `--kind text` or `--kind smiles`"
        )
    return found


def kind_of_file(
    path: Path, checkpoint: Path | None, kind: InputKind | None, *, smiles: str | None, text: str | None
) -> InputKind | None:
    """Return what the rows of a file are, by `--smiles-column` or `--text-column`, its suffix or its header.

    None: the checkpoint decides.

    Raises:
        ConfigError: They could be either.
        DataError: The file cannot be read.
    """
    if kind is not None or checkpoint is not None:
        return kind
    if smiles is not None or text is not None:
        return "smiles" if smiles is not None else "text"
    if (form := format_of(path)) in LINE_FORMATS:
        return "text" if form == ".txt" else "smiles"
    names = [*next(iter_records(path), Record(str(path), 1, {})).values]
    kinds: tuple[InputKind, ...] = ("text", "smiles")
    for plausible in kinds:
        with contextlib.suppress(DataError):
            ColumnChoice(plausible, is_of_task=True).choose(str(path), names)
            return plausible
    raise ConfigError(
        f"{path}: which column holds the masks? There are {name_some((f'`{name}`' for name in names), limit=12)}",
        "name it with `--text-column NAME` or `--smiles-column NAME`",
    )


def require_own_kind(kind: InputKind | None, own: InputKind, checkpoint: Path | None) -> None:
    """Refuse a `--kind` that the model does not read.

    Raises:
        ConfigError: It is the other one.
    """
    if kind not in (None, own):
        reads = "text" if own == "text" else "SMILES"
        raise ConfigError(f"`--kind {kind}`: {checkpoint} is a model of {reads}", "leave one of the two options out")
