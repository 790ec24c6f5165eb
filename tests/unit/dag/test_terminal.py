"""The terminal at 80 columns, with and without colours."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from exlm_cli.dag.inspect import Inspection, inspect
from exlm_cli.dag.text import render_terminal
from tests.unit.dag.dags import case_study_dag, handmade_dag
from tests.unit.dag.inspections import AWKWARD, case_study, many_masks, smiles


def _shown(inspection: Inspection, *, width: int = 80, has_colours: bool = False) -> str:
    output = io.StringIO()
    colours = "truecolor" if has_colours else None
    Console(file=output, width=width, force_terminal=has_colours, color_system=colours).print(
        render_terminal(inspection)
    )
    return output.getvalue()


@pytest.mark.parametrize("make", [case_study, smiles, lambda: many_masks(5, 4), lambda: many_masks(30, 2)])
def test_everything_fits_eighty_columns_and_needs_no_colour(make) -> None:
    shown = _shown(make())
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


def test_nodes_fillings_guess_and_transitions_are_there() -> None:
    lines = [" ".join(line.split()) for line in _shown(case_study()).splitlines()]
    assert lines[0] == "This is [MASK 1], and I'm very [MASK 2] to see this."
    for line in (
        "1 3 0.42 amazing 0.58, wonderful 0.24, beautiful 0.10",
        "share joint fillings, share of all fillings with 2 tokens",
        "1 11.8 % This is amazing, and I'm very glad to see this.",
        "11.8 % This is amazing, and I'm very glad to see this.",
        "each [MASK] guessed on its own, 7.2 % if masks were independent",
        "from to transition paths",
        "BOS 3 amazing 0.41 0.42",
        "2 terrible 5 sorry 0.86 0.28",
    ):
        assert line in lines


def test_a_collapsed_dag_is_called_one() -> None:
    """Only the last state of each mask is ever visited."""
    edges = {0: {2: 1.0}, 1: {2: 1.0}, 2: {4: 1.0}, 3: {4: 1.0}, 4: {5: 1.0}}
    dag = handmade_dag("[MASK] [MASK]", [{"a": 0.5, "b": 0.5}] * 4, edges, 2)
    said = (
        "1.00 of 2 states in use per [MASK]: this DAG has collapsed onto one path, "
        "and each [MASK] is filled on its own."
    )
    assert said in " ".join(_shown(inspect(dag)).split())
    assert "collapsed" not in _shown(case_study())


def test_words_have_the_colours_of_their_masks() -> None:
    shown = _shown(case_study(), has_colours=True)
    assert "48;2;244;197;66mamazing" in shown
    assert "48;2;168;107;60mglad" in shown


def test_long_sentences_show_only_what_fills_their_masks() -> None:
    shown = _shown(many_masks(5, 4))
    best = many_masks(5, 4).n_best.fillings[0]
    words = [many_masks(5, 4).dag.tokenizer.decode(list(tokens)).strip() for tokens in best.tokens_by_mask]
    assert " · ".join(words) in shown


def test_smiles_are_marked() -> None:
    shown = _shown(smiles())
    assert "RDKit" in shown
    assert sum(line.rstrip().endswith("refused") for line in shown.splitlines()) >= 1


def test_a_model_without_transitions_lists_none() -> None:
    inspection = replace(case_study(), dag=replace(case_study().dag, has_transitions=False))
    assert "transition" not in _shown(inspection)


def test_any_length_is_named_and_an_empty_mask_leaves_nothing() -> None:
    shown = _shown(inspect(case_study_dag(), length="any", num_fillings=30))
    assert "share of all fillings of any length" in shown
    assert "This is, and I'm very" in shown


def test_a_list_that_is_not_proven_says_so() -> None:
    inspection = case_study()
    doubtful = replace(inspection, n_best=replace(inspection.n_best, is_proven=False))
    assert "may be missing" in " ".join(_shown(doubtful).split())
    assert "may be missing" not in _shown(inspection)


@pytest.mark.parametrize("word", AWKWARD)
def test_words_are_not_markup(word: str) -> None:
    inspection = many_masks(1, 2, 3, (word, "[bold]x[/bold]", ":smile:"))
    shown = _shown(inspection)
    assert "[bold]x[/bold]" in shown
    assert ":smile:" in shown
    assert "\x1b" not in shown
