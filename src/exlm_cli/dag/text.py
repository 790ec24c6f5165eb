"""One DAG as text: a terminal view at 80 columns, and JSON."""

import json
import math
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exlm_cli.dag.fillings import Filling
from exlm_cli.dag.inspection import WITHOUT_DAG, Inspection, two_decimals
from exlm_cli.format import format_percent, printable
from exlm_cli.report.style import ink_on, mask_colour

SCHEMA = "exlm.dag/1"
"""Name and version of the JSON layout."""

_MAX_TEXT = 58
_NUM_TRANSITIONS = 8


def render_terminal(inspection: Inspection) -> RenderableType:
    """Return the sentence, its nodes, its fillings beside the independent guess, and the strongest transitions.

    Every table fits 80 columns and can be read without its colours.
    """
    pieces = inspection.sentence()
    sentence = Text.assemble(*((f"[MASK {m + 1}]", _mask_style(m)) if m >= 0 else piece for piece, m in pieces))
    parts: list[RenderableType] = [sentence, Text(inspection.health())]
    parts += ["", _nodes(inspection), "", _fillings(inspection)]
    if inspection.dag.has_transitions:
        parts += ["", _transitions(inspection)]
    return Group(*parts)


def render_json(inspection: Inspection) -> str:
    """Return `inspection_as_dict` as JSON."""
    return json.dumps(inspection_as_dict(inspection), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def inspection_as_dict(inspection: Inspection) -> dict[str, Any]:
    """Return the content of the JSON file.

    Masks and states count from 1, nodes from 0 (BOS). `probability` is that of a text among all that the DAG yields,
    `share` that among the texts with as many tokens as masks; for `length: any` the two are equal. A log-probability
    of -inf is null. `transitions[v][u]` is E[v, u]; it is null for a model without transitions.
    """
    dag, n_best, guess = inspection.dag, inspection.n_best, inspection.guess
    return {
        "schema": SCHEMA,
        "text": dag.text,
        "kind": dag.kind,
        "checkpoint": inspection.checkpoint,
        "num_masks": dag.num_masks,
        "num_states_per_mask": dag.num_states_per_mask,
        "has_transitions": dag.has_transitions,
        "nodes": [_node_as_dict(inspection, node) for node in range(dag.num_nodes)],
        "transitions": dag.trans.round(9).tolist() if dag.has_transitions else None,
        "best_path": inspection.path,
        "states_in_use": inspection.states_in_use().round(9).tolist(),
        "length": inspection.length,
        "probability_of_length": math.exp(n_best.log_prob_length),
        "fillings": [_filling_as_dict(inspection, filling) for filling in n_best.fillings],
        "fillings_are_proven_best": n_best.is_proven,
        "independent_guess": {
            **_filling_as_dict(inspection, guess.filling),
            "token_probabilities": list(guess.token_probs),
            "probability_if_independent": guess.prob_independent,
        },
    }


def _mask_style(mask: int) -> str:
    """Return the terminal style of a word that fills or names a mask."""
    colour = mask_colour(mask)
    return f"{ink_on(colour)} on {colour}"


def _nodes(inspection: Inspection) -> Table:
    dag = inspection.dag
    table = _table("mask", ">node", ">paths", "most probable words")
    for node in range(1, dag.num_nodes - 1):
        mask = int(dag.node_mask[node])
        words = Text(inspection.listed_words(node))
        words.stylize("bold", 0, len(inspection.quote(inspection.word(node))))
        name = Text(f" {mask + 1} ", style=_mask_style(mask))
        table.add_row(name, str(node), two_decimals(inspection.occupancy[node]), words)
    return table


def _fillings(inspection: Inspection) -> Table:
    n_best, guess = inspection.n_best, inspection.guess
    verdict = ["RDKit"] if inspection.dag.kind == "smiles" else []
    table = _table(">", ">share", f"joint fillings, share {inspection.counted_fillings()}", *verdict)
    for rank, filling in enumerate(n_best.fillings, start=1):
        table.add_row(str(rank), *_filling_cells(inspection, filling))
    table.add_section()
    table.add_row("", "", Text(f"{WITHOUT_DAG}:", style="dim"))
    table.add_row("", *_filling_cells(inspection, guess.filling))
    table.add_row("", "", Text(f"({inspection.share_if_independent()})", style="dim"))
    if not n_best.is_proven:
        table.add_row("", "", Text(inspection.note_on_proof(), style="bold"))
    return table


def _filled(inspection: Inspection, filling: Filling) -> Text:
    """Return the filled text; for a long sentence only the words that fill its masks."""
    text = Text()
    if len(filling.text) > _MAX_TEXT and inspection.dag.kind == "text":
        for mask, word in enumerate(inspection.filled_words(filling)):
            text.append(" · " if mask else "").append(word, style=_mask_style(mask))
        return text
    for piece, mask in inspection.dag.segments(filling.tokens_by_mask):
        word = piece.strip(" ") if mask >= 0 else ""
        before, _, after = piece.partition(word) if word else (piece, "", "")
        text.append(printable(before)).append(printable(word), style=_mask_style(mask)).append(printable(after))
    # characters split over tokens come out whole only where the whole text is decoded at once
    whole = printable(filling.text)
    return text if text.plain.strip(" ") == whole else Text(whole)


def _filling_cells(inspection: Inspection, filling: Filling) -> list[str | Text]:
    cells: list[str | Text] = [format_percent(inspection.share(filling)), _filled(inspection, filling)]
    if filling.is_valid_smiles is not None:
        cells.append("valid" if filling.is_valid_smiles else "refused")
    return cells


def _transitions(inspection: Inspection) -> Table:
    table = _table("strongest transitions from", "to", ">transition", ">paths")
    for edge in inspection.strongest_transitions(_NUM_TRANSITIONS):
        ends = [_named(inspection, node) for node in edge]
        table.add_row(*ends, *map(two_decimals, (inspection.dag.trans[edge], inspection.edge_use[edge])))
    return table


def _named(inspection: Inspection, node: int) -> Text:
    mask = int(inspection.dag.node_mask[node])
    word = Text(inspection.quote(inspection.word(node)), style=_mask_style(mask))
    return word if mask < 0 else Text.assemble(f"{node} ", word)


def _table(*columns: str) -> Table:
    """Return an empty table; a column named with `>` holds short values, set flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        is_short = name.startswith(">")
        table.add_column(
            name.removeprefix(">"), justify="right" if is_short else "left", no_wrap=is_short, overflow="fold"
        )
    return table


def _node_as_dict(inspection: Inspection, node: int) -> dict[str, Any]:
    dag = inspection.dag
    mask = int(dag.node_mask[node])
    return {
        "node": node,
        "mask": mask + 1 if mask >= 0 else None,
        "state": (node - 1) % dag.num_states_per_mask + 1 if mask >= 0 else None,
        "occupancy": round(float(inspection.occupancy[node]), 9),
        "tokens": [{"id": t.token_id, "text": t.text, "probability": t.probability} for t in inspection.tokens[node]],
    }


def _filling_as_dict(inspection: Inspection, filling: Filling) -> dict[str, Any]:
    is_possible = filling.log_prob > -math.inf
    return {
        "text": filling.text,
        "words": inspection.filled_words(filling),
        "token_ids": [list(tokens) for tokens in filling.tokens_by_mask],
        "log_probability": filling.log_prob if is_possible else None,
        "probability": math.exp(filling.log_prob),
        "share": inspection.share(filling),
        "path": list(filling.path),
        "is_valid_smiles": filling.is_valid_smiles,
    }
