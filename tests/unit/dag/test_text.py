"""Terminal view, DOT and JSON: what they hold, their width, and that no word is a command to its reader."""

import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from exlm_cli.dag.inspect import Inspection, inspect
from exlm_cli.dag.text import SCHEMA, inspection_as_dict, render_dot, render_json, render_terminal
from exlm_cli.format import printable
from tests.unit.dag.dags import case_study_dag, handmade_dag, random_dag
from tests.unit.dag.inspections import AWKWARD, awkward, case_study, many_masks, smiles

QUOTED = r'"(?:[^"\\]|\\.)*"'


def test_dot_has_every_node_its_column_and_the_likely_edges() -> None:
    dot = render_dot(case_study())
    assert '  n3 [label="amazing", color="#F4C542"' in dot
    assert "  { rank=same; n5; n6; n7; n8; }" in dot
    assert '  n2 -> n5 [label="0.86"' in dot
    edges = {(int(a), int(b)) for a, b in re.findall(r"n(\d+) -> n(\d+)", dot)}
    assert edges == {(v, u) for v, u in np.argwhere(case_study().dag.trans >= 0.03).tolist()}


def test_a_node_without_a_likely_edge_keeps_its_best_one() -> None:
    inspection = inspect(random_dag(20, 4, 5, seed=0, sharpness=0.0))
    sources = {int(a) for a in re.findall(r"n(\d+) -> n\d+", render_dot(inspection))}
    assert sources == set(range(81))


def test_dot_strings_are_closed_whatever_the_words_are() -> None:
    dot = render_dot(awkward())
    for line in dot.splitlines():
        assert '"' not in re.sub(QUOTED, "", line)
    dag = replace(case_study_dag(), text='say "x" \\ [MASK]\n[MASK]')
    assert '  label="say \\"x\\" \\\\ [MASK] [MASK]";' in render_dot(replace(case_study(), dag=dag))


def test_json_reads_back_as_the_inspection() -> None:
    inspection = case_study()
    content = json.loads(render_json(inspection))
    assert content["schema"] == SCHEMA == "exlm.dag/1"
    assert content["checkpoint"] == "runs/example/checkpoints/step-10"
    assert [node["node"] for node in content["nodes"]] == list(range(10))
    assert content["nodes"][3] | {"tokens": None} == {
        "node": 3, "mask": 1, "state": 3, "tokens": None, "occupancy": pytest.approx(inspection.occupancy[3]),
    }  # fmt: skip
    assert content["nodes"][3]["tokens"][0]["text"] == "amazing"
    assert (content["nodes"][0]["mask"], content["nodes"][0]["tokens"]) == (None, [])
    np.testing.assert_allclose(content["transitions"], np.exp(inspection.dag.log_trans), atol=1e-9)
    first = content["fillings"][0]
    assert first["text"] == "This is amazing, and I'm very glad to see this."
    assert first["words"] == ["amazing", "glad"]
    assert first["probability"] == pytest.approx(math.exp(first["log_probability"]))
    assert first["share"] == pytest.approx(first["probability"] / content["probability_of_length"])
    assert content["fillings_are_proven_best"] is True
    guess = content["independent_guess"]
    assert guess["probability_if_independent"] == pytest.approx(math.prod(guess["token_probabilities"]))


def test_json_has_no_transitions_where_the_model_has_none_and_no_infinities() -> None:
    inspection = smiles()
    no_transitions = replace(inspection, dag=replace(inspection.dag, has_transitions=False))
    assert inspection_as_dict(no_transitions)["transitions"] is None
    impossible = replace(inspection.guess.filling, log_prob=-math.inf)
    content = json.loads(render_json(replace(inspection, guess=replace(inspection.guess, filling=impossible))))
    assert content["independent_guess"]["log_probability"] is None
    assert content["independent_guess"]["probability"] == 0
    assert {filling["is_valid_smiles"] for filling in content["fillings"]} == {True, False}


def _shown(inspection: Inspection, *, width: int = 80, has_colours: bool = False) -> str:
    output = io.StringIO()
    colours = "truecolor" if has_colours else None
    console = Console(file=output, width=width, force_terminal=has_colours, color_system=colours)
    console.print(render_terminal(inspection))
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
        "1 11.8 % This is amazing, and I'm very glad to see this.",
        "11.8 % This is amazing, and I'm very glad to see this.",
        "each [MASK] guessed on its own, 7.2 % if masks were independent",
        "2 terrible 5 sorry 0.86 0.28",
    ):
        assert line in lines
    assert "RDKit" not in " ".join(lines)


def test_a_long_sentence_shows_what_fills_its_masks_and_a_molecule_its_verdict() -> None:
    inspection = many_masks(5, 4)
    assert " · ".join(inspection.filled_words(inspection.n_best.fillings[0])) in _shown(inspection)
    no_dag = _shown(replace(smiles(), dag=replace(smiles().dag, has_transitions=False)))
    assert "RDKit" in no_dag
    assert "refused" in no_dag
    assert "transition" not in no_dag


def test_a_collapsed_dag_is_called_so() -> None:
    """Only the last state of each mask is ever visited."""
    edges = {0: {2: 1.0}, 1: {2: 1.0}, 2: {4: 1.0}, 3: {4: 1.0}, 4: {5: 1.0}}
    dag = handmade_dag("[MASK] [MASK]", [{"a": 0.5, "b": 0.5}] * 4, edges, 2)
    assert "1.00 of 2 states in use per [MASK]: this DAG has collapsed" in " ".join(_shown(inspect(dag)).split())
    assert "collapsed" not in _shown(case_study())


def test_words_have_the_colours_of_their_masks() -> None:
    assert all(word in _shown(case_study(), has_colours=True) for word in ("2;244;197;66mamazing", "2;168;107;60mglad"))


def test_any_length_is_named_and_an_empty_mask_leaves_nothing() -> None:
    shown = _shown(inspect(case_study_dag(), length="any", num_fillings=30))
    assert "share of all fillings of any length" in shown
    assert "This is, and I'm very" in shown


def test_a_list_that_is_not_proven_says_so() -> None:
    inspection = case_study()
    doubtful = replace(inspection, n_best=replace(inspection.n_best, is_proven=False))
    assert "may be missing" in " ".join(_shown(doubtful).split())
    assert "may be missing" not in _shown(inspection)


def test_words_are_not_markup() -> None:
    shown = _shown(awkward(), width=200)
    assert all(printable(word) in shown for word in AWKWARD)
    assert "\x1b" not in shown


def test_punctuation_is_quoted_in_running_text_alone() -> None:
    edges = {0: {1: 1.0}, 1: {2: 1.0}}
    text, molecule = (
        _shown(inspect(handmade_dag("C[MASK]", [{"(": 0.5, "C": 0.5}], edges, 1, kind))) for kind in ("text", "smiles")
    )
    assert "“(” 0.50" in text
    assert "“" not in molecule
