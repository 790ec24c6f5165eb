"""Inputs with [MASK]s as a pre-trained model reads them: the words for a mask, checks, notes.

Axis: L tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exlm_cli.data import IntArray
from exlm_cli.data.molecules import without_atom_maps
from exlm_cli.data.rows.records import format_of
from exlm_cli.data.tokenizer import MASK, mark_masks
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, is_unicode, shorten
from exlm_cli.train.pretrained import Pretrained

MAX_INNER_NODES = 512
"""Limit on the states of all masks: the time of the search for fillings grows with T * S^2."""


@dataclass(frozen=True)
class MaskedText:
    """One input.

    Attributes:
        text: What the model reads, each mask as "[MASK]".
        input_ids: (L,) tokens, [CLS], [MASK]s and [SEP] included.
        notes: What a report says about the reading, such as tokens that the vocabulary lacks.
    """

    text: str
    input_ids: IntArray
    notes: tuple[str, ...] = ()


def read_masked(pretrained: Pretrained, text: str) -> MaskedText:
    """Return the tokens of a text with masks.

    Args:
        pretrained: The model that will read it.
        text: Running text or SMILES; each "[MASK]" or "<mask>" is one masked token, and so is an open place of a
            SMILES, `*` or `[*:1]`. A SMILES with masks is no molecule, so it is read as written, without atom-map
            numbers where the model was trained without them.

    Raises:
        DataError: The text is empty, is the name of a file, has no mask or is too long, the tokenizer needs blanks that
            it lacks, or the model is a Repeated MLM.
    """
    recipe, kind = pretrained.recipe, pretrained.recipe.data.kind
    text = mark_masks(text, kind)
    _check_sentence(text, is_smiles=kind == "smiles")
    if recipe.data.has_canonical_smiles:
        text = without_atom_maps(text)
    _require_single_tokens(pretrained)
    input_ids, notes = encode_masked(pretrained, text)
    require_size(pretrained, len(input_ids), int((input_ids == pretrained.tokenizer.mask_id).sum()))
    return MaskedText(text, input_ids, notes)


def read_masked_rows(
    pretrained: Pretrained, texts: Sequence[str]
) -> tuple[tuple[MaskedText | None, ...], tuple[str, ...]]:
    """Return the tokens of each text, None where it cannot be read, and why it cannot; empty where it can."""
    found: list[MaskedText | None] = []
    problems = []
    for text in texts:
        try:
            found.append(read_masked(pretrained, text))
            problems.append("")
        except DataError as error:
            found.append(None)
            problems.append(error.message)
    return tuple(found), tuple(problems)


def encode_masked(pretrained: Pretrained, text: str) -> tuple[IntArray, tuple[str, ...]]:
    """Return [CLS], the tokens of a text with "[MASK]"s or without, and [SEP]; and notes on how it is read.

    Raises:
        DataError: The tokenizer knows its letters, but only with blanks between them.
    """
    tokenizer, most = pretrained.tokenizer, pretrained.recipe.data.sequence_length
    ids = tokenizer.encode_with_masks(text.strip())
    notes = []
    if num_unknown := ids.count(tokenizer.unk_id):
        spaced = " ".join(re.findall(rf"{re.escape(MASK)}|\S", text))
        if tokenizer.kind == "text" and tokenizer.unk_id not in tokenizer.encode_with_masks(spaced):
            raise DataError(
                f"the model's tokenizer reads letters with blanks between them, which {shorten(text, 40)!r} lacks",
                f"write it as {shorten(spaced, 40)!r}",
            )
        counted = format_number_of(num_unknown, "token")
        notes.append(f"the model reads {counted} of the input as [UNK]: not in the vocabulary")
    if len(ids) + 2 > most:
        notes.append(f"longer than the {most} tokens that the model was trained on, so it may fill masks poorly")
    return np.array([tokenizer.cls_id, *ids, tokenizer.sep_id]), tuple(notes)


def _require_single_tokens(pretrained: Pretrained) -> None:
    num_repeats = pretrained.recipe.masking.num_repeats
    if num_repeats > 1:
        raise DataError(
            f"{pretrained.checkpoint} is a Repeated MLM (`masking.num_repeats` {num_repeats}): it reads repeated text, "
            "whose masks cannot be filled one by one",
            "choose an ExLM or MLM with `--checkpoint RUN`",
        )


def require_size(pretrained: Pretrained, num_tokens: int, num_masks: int) -> None:
    """Refuse more tokens than the model takes, or more masks than the search does.

    Raises:
        DataError: There are.
    """
    recipe, k = pretrained.recipe, pretrained.model.num_states_per_mask
    transition = recipe.model.transition
    num_further = (k - 1) * num_masks if pretrained.model.expands_input else 0
    max_inner = MAX_INNER_NODES
    if recipe.has_transitions and transition.position_features:
        max_inner = min(max_inner, transition.max_nodes - 2)
    if k * num_masks > max_inner:
        most = max_inner // k
        if num_further:  # the sentence must fit into the model too
            most = min(most, (recipe.model.max_length - num_tokens) // (k - 1))
        raise DataError(
            f"the sentence has {num_masks} masks of {k} states, {k * num_masks:,} nodes; an inspection with this model "
            f"takes at most {max_inner:,}",
            f"mask at most {most} tokens" if most > 0 else "shorten it",
        )
    expanded = num_tokens + num_further
    if expanded > recipe.model.max_length:
        raise DataError(
            f"the sentence has {num_tokens} tokens, {expanded} with its masks expanded; the model takes "
            f"{recipe.model.max_length}",
            "shorten it",
        )


def _check_sentence(text: str, *, is_smiles: bool) -> None:
    """Check that an input has something to predict.

    Raises:
        DataError: It is empty or the name of a file, has no [MASK], or contains a lone surrogate.
    """
    example = "c1ccc([MASK])cc1" if is_smiles else "This is [MASK], and I'm very [MASK] to see this."
    hint = f'write [MASK] for each hidden token, as in "{example}"'
    if not text.strip():
        raise DataError("the sentence is empty", hint)
    if not is_unicode(text):
        raise DataError(f"{shorten(ascii(text), 60)} contains a lone surrogate", hint)
    if MASK not in text and format_of(Path(text)) is not None:
        raise DataError(
            f"{shorten(text, 60)!r} is the name of a file, not a text with a [MASK]",
            "check its path: `exlm fill FILE` fills the masks of each row of a file that there is",
        )
    if MASK not in text:
        raise DataError(f"there is no [MASK] in {shorten(text, 60)!r}", hint)
