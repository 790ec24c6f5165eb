"""DOT and JSON: escaping, and that JSON holds what the inspection says."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from exlm_cli.dag.inspect import inspect
from exlm_cli.dag.text import SCHEMA, inspection_as_dict, render_dot, render_json
from tests.unit.dag.dags import case_study_dag, random_dag
from tests.unit.dag.inspections import AWKWARD, case_study, many_masks, smiles

QUOTED = r'"(?:[^"\\]|\\.)*"'


def test_dot_has_every_node_its_column_and_the_likely_edges() -> None:
    dot = render_dot(case_study())
    assert dot.startswith("digraph dag {\n")
    assert dot.endswith("}\n")
    assert '  n3 [label="amazing", color="#F4C542"' in dot
    assert "  { rank=same; n5; n6; n7; n8; }" in dot
    assert '  n2 -> n5 [label="0.86"' in dot
    edges = {(int(a), int(b)) for a, b in re.findall(r"n(\d+) -> n(\d+)", dot)}
    probabilities = np.exp(case_study().dag.log_trans)
    assert edges == set(zip(*map(np.ndarray.tolist, np.nonzero(probabilities >= 0.03)), strict=True))


def test_a_node_without_a_likely_edge_keeps_its_best_one() -> None:
    inspection = inspect(random_dag(20, 4, 5, seed=0, sharpness=0.0))
    sources = {int(a) for a in re.findall(r"n(\d+) -> n\d+", render_dot(inspection))}
    assert sources == set(range(81))


def test_dot_strings_are_closed_whatever_the_words_are() -> None:
    dot = render_dot(many_masks(2, 4, 5, tuple(AWKWARD)))
    for line in dot.splitlines():
        assert '"' not in re.sub(QUOTED, "", line)
    dag = replace(case_study_dag(), text='say "x" \\ [MASK]\n[MASK]')
    assert '  label="say \\"x\\" \\\\ [MASK] [MASK]";' in render_dot(replace(case_study(), dag=dag))


def test_json_reads_back_as_the_inspection() -> None:
    inspection = case_study()
    content = json.loads(render_json(inspection))
    assert content == json.loads(json.dumps(inspection_as_dict(inspection)))
    assert content["schema"] == SCHEMA == "exlm.dag/1"
    assert content["checkpoint"] == "runs/example/checkpoints/step-10"
    assert [node["node"] for node in content["nodes"]] == list(range(10))
    assert content["nodes"][3] | {"tokens": None} == {
        "node": 3, "mask": 1, "state": 3, "tokens": None, "occupancy": pytest.approx(inspection.occupancy[3]),
    }  # fmt: skip
    assert content["nodes"][3]["tokens"][0]["text"] == "amazing"
    assert content["nodes"][0]["mask"] is None
    assert content["nodes"][0]["tokens"] == []
    np.testing.assert_allclose(content["transitions"], np.exp(inspection.dag.log_trans), atol=1e-9)
    first = content["fillings"][0]
    assert first["text"] == "This is amazing, and I'm very glad to see this."
    assert first["words"] == ["amazing", "glad"]
    assert first["probability"] == pytest.approx(math.exp(first["log_probability"]))
    assert first["share"] == pytest.approx(first["probability"] / content["probability_of_length"])
    assert first["is_valid_smiles"] is None
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
    assert [f["is_valid_smiles"] for f in content["fillings"]] == [
        f.is_valid_smiles for f in inspection.n_best.fillings
    ]
