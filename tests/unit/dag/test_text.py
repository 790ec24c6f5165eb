"""Terminal view and JSON: what they hold, their width, and that no word is a command to its reader."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from exlm_cli.dag.inspection import Inspection, inspect
from exlm_cli.dag.text import SCHEMA, inspection_as_dict, render_json, render_terminal
from tests.unit.dag.dags import case_study_dag, handmade_dag
from tests.unit.dag.inspections import case_study, many_masks, smiles


def test_json_reads_back_as_the_inspection():
    inspection = case_study()
    content = json.loads(render_json(inspection))
    assert content["schema"] == SCHEMA == "exlm.dag/1"
    assert content["checkpoint"] == "runs/example/checkpoints/step-10"
    assert [node["node"] for node in content["nodes"]] == list(range(10))
    assert content["nodes"][3] | {"tokens": None} == {
        "node": 3, "mask": 1, "state": 3, "tokens": None, "occupancy": pytest.approx(inspection.occupancy[3]),
    }  # fmt: skip
    assert content["nodes"][3]["tokens"][0]["text"] == "amazing"
    for end in (0, -1):  # BOS and EOS are no states of a mask
        assert [content["nodes"][end][name] for name in ("mask", "state", "tokens")] == [None, None, []]
    np.testing.assert_allclose(content["transitions"], np.exp(inspection.dag.log_trans), atol=1e-9)
    first = content["fillings"][0]
    assert first["text"] == "This is amazing, and I'm very glad to see this."
    assert first["words"] == ["amazing", "glad"]
    assert first["probability"] == pytest.approx(math.exp(first["log_probability"]))
    assert first["share"] == pytest.approx(first["probability"] / content["probability_of_length"])
    assert content["fillings_are_proven_best"] is True
    guess = content["independent_guess"]
    assert guess["probability_if_independent"] == pytest.approx(math.prod(guess["token_probabilities"]))


def test_json_has_no_transitions_where_the_model_has_none_and_no_infinities():
    inspection = smiles()
    no_transitions = replace(inspection, dag=replace(inspection.dag, has_transitions=False))
    assert inspection_as_dict(no_transitions)["transitions"] is None
    impossible = replace(inspection.guess.filling, log_prob=-math.inf)
    content = json.loads(render_json(replace(inspection, guess=replace(inspection.guess, filling=impossible))))
    assert content["independent_guess"]["log_probability"] is None
    assert content["independent_guess"]["probability"] == 0
    assert {filling["is_valid_smiles"] for filling in content["fillings"]} == {True, False}


def _shown(inspection: Inspection) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(render_terminal(inspection))
    return console.file.getvalue()


@pytest.mark.parametrize("make", [smiles, lambda: many_masks(30, 2)])
def test_everything_fits_eighty_columns_and_needs_no_colour(make):
    shown = _shown(make())
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


def test_what_is_special_about_a_dag_is_said_of_it_alone():
    """A search that met its limit, punctuation of running text, and a mask that is left empty."""
    text, molecule = (
        inspect(handmade_dag("C[MASK]", [{"(": 0.5, "C": 0.5}], {0: {1: 1.0}, 1: {2: 1.0}}, 1, kind))
        for kind in ("text", "smiles")
    )
    plain = case_study()
    for special, other, said in (
        (replace(plain, n_best=replace(plain.n_best, is_proven=False)), plain, "may be missing"),
        (text, molecule, "“(” 0.50"),
        (inspect(case_study_dag(), length="any", num_fillings=30), plain, "This is, and I'm very"),
    ):
        assert said in " ".join(_shown(special).split())
        assert said not in " ".join(_shown(other).split())
