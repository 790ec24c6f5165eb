"""The positive one of two classes follows from what their names mean in assays, in whatever order they come."""

import pytest

from exlm_cli.tasks.rows.positive import find_positive


@pytest.mark.parametrize(
    ("positive", "negative"),
    [
        ("Active", "Inactive"),
        ("active", "non-active"),
        ("ACTIVE", "not active"),
        ("toxic", "nontoxic"),
        ("Toxic", "Non Toxic"),
        ("toxic", "safe"),
        ("hit", "no hit"),
        ("hit", "miss"),
        ("binder", "non-binder"),
        ("binder", "decoy"),
        ("positive", "Negative"),
        ("pos", "neg"),
        ("true", "not true"),
        ("high", "low"),
        ("high", "medium"),
        ("good", "bad"),
        ("sensitive", "resistant"),
        ("mutagenic", "non-mutagenic"),
        ("soluble", "insoluble"),
        ("permeable", "impermeable"),
        ("stable", "unstable"),
        ("substrate", "non_substrate"),
        ("hERG blocker", "hERG non-blocker"),
        ("CYP3A4_inhibitor", "CYP3A4_non-inhibitor"),
        ("active compound", "inactive compound"),
        ("BBB+", "BBB-"),
        ("BBB+", "BBB\u2212"),
        ("+", "-"),
        ("Active", "Inconclusive"),
        ("agonist", "inactive"),
        ("case", "control"),
    ],
)
def test_names_tell_which_class_is_positive(positive, negative):
    assert find_positive((positive, negative)) == positive
    assert find_positive((negative, positive)) == positive


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("mild", "severe"),
        ("agonist", "antagonist"),
        ("a", "b"),
        ("1", "2"),
        ("-1", "1"),
        ("0", "1"),
        ("inhibitor", "substrate"),
    ],
)
def test_names_of_no_known_meaning_do_not_tell(one, two):
    assert find_positive((one, two)) is None
    assert find_positive((two, one)) is None
