"""What two recipes differ in."""

from exlm_cli.config.load import load_recipe
from exlm_cli.config.overrides import changed_keys, describe_changes


def test_changes_are_told_by_their_dotted_keys() -> None:
    before, after = (
        load_recipe("text-base", overrides).model_dump(mode="json")
        for overrides in ([], ["optim.lr=0.5", "optim.betas=[0.8, 0.9]", "train.max_epochs=null"])
    )
    assert changed_keys(before, before) == {}
    assert describe_changes(before, before) == ""
    assert changed_keys(before, after) == {
        "optim.lr": (before["optim"]["lr"], 0.5),
        "optim.betas": (before["optim"]["betas"], [0.8, 0.9]),
    }
    lr, betas = before["optim"]["lr"], before["optim"]["betas"]
    assert describe_changes(before, after) == (
        f": `optim.lr` was {lr} and is 0.5, `optim.betas` was [{betas[0]}, {betas[1]}] and is [0.8, 0.9]"
    )


def test_a_key_of_one_side_is_null_on_the_other_and_a_long_list_is_cut() -> None:
    assert changed_keys({"a": {"b": 1}}, {"a": {}}) == {"a.b": (1, None)}
    assert changed_keys({"a": {}}, {"a": {"b": 1}}) == {"a.b": (None, 1)}
    before, after = (dict.fromkeys("abcde", value) for value in (1, "x y"))
    assert describe_changes(before, after) == (
        ": `a` was 1 and is x y, `b` was 1 and is x y, `c` was 1 and is x y, 2 more"
    )
