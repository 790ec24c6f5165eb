"""What reports are given: shares of states against their definition."""

import math
from dataclasses import replace

import numpy as np
import pytest

from exlm_cli.dag.build import build_dag
from exlm_cli.dag.inspection import inspect
from tests.unit.dag.dags import case_study_dag
from tests.unit.fill.models import drawn, sentence_tokenizer


def test_states_in_use_are_the_perplexity_of_their_shares():
    inspection = inspect(case_study_dag())
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    visits = np.array([1.0, *shares, *(0.5 * np.array([0, 1, 1, 0])), 1.0])
    in_use = replace(inspection, occupancy=visits).states_in_use()
    assert in_use == pytest.approx([math.exp(-(shares * np.log(shares)).sum()), 2.0])
    assert replace(inspection, occupancy=np.array([1.0, *shares, 0, 0, 0, 0, 1.0])).states_in_use()[1] == 0.0


def test_the_strongest_transitions_are_those_that_most_paths_take():
    inspection = inspect(case_study_dag())
    edges = inspection.strongest_transitions(100)
    uses = [inspection.edge_use[edge] for edge in edges]
    assert uses == sorted(uses, reverse=True) == sorted(inspection.edge_use[inspection.edge_use > 0], reverse=True)
    assert inspection.strongest_transitions(3) == edges[:3]


def test_a_chain_with_one_state_in_use_has_not_collapsed_as_its_masks_read_each_other():
    one_state = np.array([1.0, 1, 0, 0, 1, 0, 0, 1.0])
    for design, has_collapsed in (("chain", False), ("input", True)):
        inspection = inspect(build_dag(drawn(sentence_tokenizer(), design), "This is [MASK] [MASK]."))
        health = replace(inspection, occupancy=one_state[: inspection.dag.num_nodes]).health()
        assert health.startswith("1.00 of 3 states in use")
        assert ("collapsed" in health) == has_collapsed
