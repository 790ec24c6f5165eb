"""Figures that show a collapse, the cure that a recipe is given, and the end of a run that asks for it."""

import pytest

from exlm_cli.errors import CollapsedError
from exlm_cli.train.evaluation import CollapseWatch, find_collapse
from tests.recorder import Recorder
from tests.tiny import tiny_recipe

HEALTHY = {"masks_with_0_share": 0.05, "effective_states": 1.06}
SEEING = {"rope": "nodes", "start": "next_mask"}


def _watched(rows, **train) -> list[str]:
    progress = Recorder()
    watch = CollapseWatch(tiny_recipe(train=train), progress)
    for step, figures in enumerate(rows, start=4):
        watch.on_validate(step, figures)
    return progress.said


def test_each_kind_of_collapse_is_reported_once_and_a_dag_in_use_is_no_news():
    assert _watched([HEALTHY]) == []
    passed_over = HEALTHY | {"masks_with_0_share": 0.32}
    one_state = HEALTHY | {"effective_states": 1.004}
    first, second = _watched([passed_over, passed_over, one_state, one_state])
    assert first == (
        "warning: the DAG of step 4 has collapsed: 32.0 % of the masks yield no token; start a new run with "
        "`model.transition.rope=nodes` and `model.transition.start=next_mask`"
    )
    assert second.startswith("warning: the DAG of step 6 has collapsed: 1.00 of 3 states of a mask are in use; ")


def test_a_run_stops_where_its_recipe_says_so():
    with pytest.raises(CollapsedError, match=r"step 4 has collapsed: 32\.0 % of the masks") as caught:
        _watched([HEALTHY | {"masks_with_0_share": 0.32}], on_collapse="stop")
    assert "`model.transition.start=next_mask`" in caught.value.hint
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("transition", "cure"),
    [
        ({"rope": "tokens"}, "`model.transition.start=next_mask`"),
        ({"start": "lanes"}, "`model.transition.rope=nodes`"),
        (SEEING, "a lower `optim.lr` (now 0.001)"),
    ],
)
def test_a_cure_of_paths_names_what_the_recipe_lacks(transition, cure):
    recipe = tiny_recipe(model={"transition": transition})
    (_, given) = find_collapse(HEALTHY | {"masks_with_0_share": 0.1}, recipe)["passed over"]
    assert given == f"start a new run with {cure}"


def test_a_cure_of_states_names_what_the_recipe_lacks_and_at_last_fewer_states():
    row = HEALTHY | {"effective_states": 1.0}
    assert find_collapse(row, tiny_recipe(masking={"num_states_per_mask": 1})) == {}
    model = {"mask_attention": "first", "clone_embedding": "nodes"}
    (_, cure) = find_collapse(row, tiny_recipe(model=model))["one state"]
    assert cure == "to keep states apart, start a new run with `model.transition.balance=0.1`"
    model["transition"] = {"balance": 0.1}
    (_, cure) = find_collapse(row, tiny_recipe(model=model))["one state"]
    assert cure == "`masking.num_states_per_mask=1` predicts the same for less"
