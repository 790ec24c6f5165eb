"""What of a recipe decides the weights, and the hashes that say so."""

from exlm_cli.train.identity import former_identities, recipe_identity, trained_identity
from tests.tiny import tiny_recipe

PLACES = {"train": ["a.txt"], "valid": ["b.txt"], "cache_dir": "c"}


def test_what_does_not_decide_the_weights_may_change_between_runs() -> None:
    base = recipe_identity(tiny_recipe())
    assert recipe_identity(tiny_recipe(name="other", train={"validate_every_steps": 77, "keep_last": 9})) == base
    assert recipe_identity(tiny_recipe(optim={"lr": 2e-3})) != base
    assert recipe_identity(tiny_recipe(seed=3)) != base


def test_where_the_inputs_lie_decides_no_weights() -> None:
    """Of whatever else is in a recipe the two identities say the same."""
    base, moved = tiny_recipe(), tiny_recipe(data=PLACES, tokenizer={"path": "t.json"})
    assert trained_identity(moved) == trained_identity(base)
    assert recipe_identity(moved) != recipe_identity(base)
    assert former_identities(moved, base) == former_identities(base, base)
    assert recipe_identity(base) in former_identities(moved, base)
    for sections in ({"seed": 3}, {"data": {"sequence_length": 12}}, {"tokenizer": {"vocab_size": 290}}):
        assert trained_identity(tiny_recipe(**sections)) != trained_identity(base)
        for now, then in zip(
            former_identities(tiny_recipe(**sections), base), former_identities(base, base), strict=True
        ):
            assert now != then
    for name in PLACES:
        assert recipe_identity(tiny_recipe(data={name: PLACES[name]})) != recipe_identity(base)
