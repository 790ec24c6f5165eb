"""A DAG in a terminal: readable at 80 columns, and without its colours."""

import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exlm_cli.dag.fillings import Filling
from exlm_cli.dag.graph import printable
from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.words import counted_fillings, filled_words, health, note_on_proof, sentence_words
from exlm_cli.format import format_percent
from exlm_cli.report.style import ink_on, mask_colour

_LONGEST_TEXT = 58


def render_terminal(inspection: Inspection, num_transitions: int = 8) -> RenderableType:
    """Return the sentence, its nodes, its fillings beside the independent guess, and the strongest transitions.

    Args:
        inspection: What to show.
        num_transitions: How many transitions.
    """
    parts: list[RenderableType] = [
        _sentence(inspection),
        Text(health(inspection)),
        "",
        _nodes(inspection),
        "",
        _fillings(inspection),
    ]
    if inspection.dag.has_transitions:
        parts += ["", _transitions(inspection, num_transitions)]
    return Group(*parts)


def mask_style(mask: int) -> str:
    """Return the terminal style of a word that fills or names a mask."""
    colour = mask_colour(mask)
    return f"{ink_on(colour)} on {colour}"


def _sentence(inspection: Inspection) -> Text:
    """Return the input, each [MASK] with its number."""
    text = Text()
    for word, mask in sentence_words(inspection):
        shown = word.replace("[MASK]", f"[MASK {mask + 1}]") if mask >= 0 else word
        text.append(shown.rstrip(), style=mask_style(mask) if mask >= 0 else "")
        text.append(shown[len(shown.rstrip()) :])
    return text


def _nodes(inspection: Inspection) -> Table:
    dag = inspection.dag
    table = _table()
    table.add_column("mask", no_wrap=True)
    table.add_column("node", justify="right", no_wrap=True)
    table.add_column("paths", justify="right", no_wrap=True)
    table.add_column("most probable words", overflow="fold")
    for node, tokens in enumerate(inspection.tokens):
        mask = int(dag.node_mask[node])
        if mask < 0:
            continue
        words = Text(", ").join(
            Text.assemble((token.text, "bold" if i == 0 else ""), f" {token.probability:.2f}")
            for i, token in enumerate(tokens)
        )
        name = Text(f" {mask + 1} ", style=mask_style(mask))
        table.add_row(name, str(node), f"{inspection.occupancy[node]:.2f}", words)
    return table


def _fillings(inspection: Inspection) -> Table:
    n_best, guess = inspection.n_best, inspection.guess
    table = _table()
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column(f"joint fillings, share {counted_fillings(inspection)}", overflow="fold")
    is_smiles = inspection.dag.kind == "smiles"
    if is_smiles:
        table.add_column("RDKit", no_wrap=True)
    for rank, filling in enumerate(n_best.fillings, start=1):
        share = format_percent(math.exp(filling.log_prob - n_best.log_prob_length))
        table.add_row(str(rank), share, _filled(inspection, filling), *_verdict(filling))
    share = format_percent(math.exp(guess.filling.log_prob - n_best.log_prob_length))
    believed = format_percent(math.exp(guess.log_prob_independent))
    table.add_section()
    table.add_row("", share, _filled(inspection, guess.filling), *_verdict(guess.filling))
    table.add_row("", "", Text(f"each [MASK] guessed on its own, {believed} if masks were independent", style="dim"))
    if not n_best.is_proven:
        table.add_row("", "", Text(note_on_proof(inspection), style="bold"))
    return table


def _filled(inspection: Inspection, filling: Filling) -> Text:
    """Return the filled text; of a long one only what fills the masks."""
    text = Text()
    if len(filling.text) > _LONGEST_TEXT and inspection.dag.kind == "text":
        for mask, word in enumerate(filled_words(inspection, filling)):
            text.append(" · " if mask else "").append(word, style=mask_style(mask))
        return text
    for piece, mask in inspection.dag.segments(filling.tokens_by_mask):
        word = piece.strip(" ") if mask >= 0 else ""
        before, _, after = piece.partition(word) if word else (piece, "", "")
        text.append(printable(before)).append(printable(word), style=mask_style(mask)).append(printable(after))
    # characters split over tokens come out whole only where the whole text is decoded at once
    whole = printable(filling.text)
    return text if text.plain.strip(" ") == whole else Text(whole)


def _verdict(filling: Filling) -> list[str]:
    return [] if filling.is_valid_smiles is None else ["valid" if filling.is_valid_smiles else "refused"]


def _transitions(inspection: Inspection, num_transitions: int) -> Table:
    table = _table()
    table.add_column("from", overflow="fold")
    table.add_column("to", overflow="fold")
    table.add_column("transition", justify="right", no_wrap=True)
    table.add_column("paths", justify="right", no_wrap=True)
    for edge in inspection.strongest_transitions(num_transitions):
        ends = [_named(inspection, node) for node in (edge.source, edge.target)]
        table.add_row(*ends, f"{edge.probability:.2f}", f"{edge.use:.2f}")
    return table


def _named(inspection: Inspection, node: int) -> Text:
    mask = int(inspection.dag.node_mask[node])
    word = Text(inspection.word(node), style=mask_style(mask))
    return word if mask < 0 else Text.assemble(f"{node} ", word)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
