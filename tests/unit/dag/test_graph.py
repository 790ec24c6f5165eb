"""Numbers of a DAG against enumeration of every path, which shares no code with `src`."""

from dataclasses import replace

import numpy as np
import pytest

from exlm_cli.dag.fillings import n_best_fillings
from exlm_cli.dag.graph import edge_use, length_log_prob, most_likely_path, token_occupancy, top_tokens
from exlm_cli.errors import DataError
from tests.unit.dag.dags import case_study_dag, enumerate_paths, handmade_dag, random_dag


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize(("num_masks", "k"), [(1, 1), (1, 4), (2, 3), (3, 2), (4, 1)])
def test_numbers_of_paths_are_those_of_the_enumeration(num_masks, k, seed):
    dag = random_dag(num_masks, k, 3, seed=seed)
    paths = dict(enumerate_paths(dag, [num_masks]))
    mass = sum(paths.values())
    tokens = np.zeros((num_masks, dag.num_nodes))
    edges = np.zeros((dag.num_nodes, dag.num_nodes))
    for nodes, probability in paths.items():
        tokens[range(num_masks), nodes] += probability / mass
        stops = [0, *nodes, dag.num_nodes - 1]
        edges[stops[:-1], stops[1:]] += probability / mass
    np.testing.assert_allclose(token_occupancy(dag), tokens, atol=1e-12)
    np.testing.assert_allclose(edge_use(dag), edges, atol=1e-12)
    assert np.exp(length_log_prob(dag)) == pytest.approx(mass, rel=1e-12)
    best_word = np.exp(dag.node_log_probs.max(axis=1))
    assert most_likely_path(dag) == list(max(paths, key=lambda nodes: paths[nodes] * np.prod(best_word[list(nodes)])))


def test_top_tokens_are_sorted_with_ties_by_id_and_belong_to_inner_nodes_alone():
    tokens = top_tokens(case_study_dag(), 3)
    assert [t.text for t in tokens[3]] == ["amazing", "wonderful", "beautiful"]
    assert list(map(len, tokens)) == [0, *[3] * 8, 0]
    dag = random_dag(1, 1, 4, seed=0)
    dag = replace(dag, numbers=lambda log_trans=dag.log_trans: (np.log(np.full((3, 4), 0.25)), log_trans))
    assert [t.token_id for t in top_tokens(dag, 3)[1]] == [0, 1, 2]


def test_segments_and_fill_put_tokens_at_their_masks():
    dag = case_study_dag()
    words = {t.text: t.token_id for node in top_tokens(dag, 4) for t in node}
    filled = ((words["amazing"], words["great"]), ())
    assert dag.fill(filled) == "This is amazing great, and I'm very to see this."
    assert dag.segments(filled) == [
        ("This is", -1),
        (" amazing great", 0),
        (", and I'm very", -1),
        (" to see this.", -1),
    ]
    assert (dag.num_masks, dag.num_nodes) == (2, 10)


def test_a_dag_without_a_path_of_the_right_length_is_refused():
    to_the_end = handmade_dag("a [MASK]", [{"b": 0.9, "c": 0.1}], {0: {2: 1.0}, 1: {2: 1.0}}, 1)
    with pytest.raises(DataError, match=r"exactly 1 token$") as caught:
        n_best_fillings(to_the_end, 3)
    assert "`--checkpoint " in caught.value.hint
    assert [filling.text for filling in n_best_fillings(to_the_end, 3, "any").fillings] == ["a"]
