"""What reports are given: shares of paths against their definition."""

import math
from dataclasses import replace

import numpy as np
import pytest

from exlm_cli.dag.build import build_dag
from exlm_cli.dag.inspection import inspect
from exlm_cli.data.tokenizer import train_bpe
from exlm_cli.progress import SilentProgress
from tests.unit.dag.dags import case_study_dag, enumerate_paths
from tests.unit.dag.test_build import TEXTS
from tests.unit.fill.models import drawn


def test_states_in_use_are_the_perplexity_of_their_shares():
    inspection = inspect(case_study_dag())
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    visits = np.array([1.0, *shares, *(0.5 * np.array([0, 1, 1, 0])), 1.0])
    in_use = replace(inspection, occupancy=visits).states_in_use()
    assert in_use == pytest.approx([math.exp(-(shares * np.log(shares)).sum()), 2.0])
    assert replace(inspection, occupancy=np.array([1.0, *shares, 0, 0, 0, 0, 1.0])).states_in_use()[1] == 0.0


def test_the_strongest_transitions_are_those_that_most_paths_take():
    inspection = inspect(case_study_dag())
    paths = dict(enumerate_paths(inspection.dag, [2]))
    mass = sum(paths.values())
    edges = inspection.strongest_transitions(100)
    uses = [inspection.edge_use[edge] for edge in edges]
    assert uses == sorted(uses, reverse=True)
    assert uses[edges.index((2, 5))] == pytest.approx(sum(p for nodes, p in paths.items() if nodes == (2, 5)) / mass)
    assert inspection.strongest_transitions(3) == edges[:3]
    assert math.exp(inspection.log_prob_exact) == pytest.approx(mass)
    visits = [sum(p for nodes, p in paths.items() if node in nodes) / mass for node in range(1, 9)]
    assert inspection.occupancy == pytest.approx([1.0, *visits, 1.0])


def test_a_chain_with_one_state_in_use_has_not_collapsed_as_its_masks_read_each_other():
    tokenizer = train_bpe(TEXTS, 320, 2, SilentProgress())
    inspection = inspect(build_dag(drawn(tokenizer, "chain"), "This is [MASK] [MASK]."))
    one_state = np.array([1.0, 1, 0, 0, 1, 0, 0, 1.0])
    health = replace(inspection, occupancy=one_state).health()
    assert health.startswith("1.00 of 3 states in use")
    assert "each mask reads the token of the one before" in health
    dense = inspect(build_dag(drawn(tokenizer, "input"), "This is [MASK] [MASK]."))
    assert "collapsed" in replace(dense, occupancy=one_state[: dense.dag.num_nodes]).health()
