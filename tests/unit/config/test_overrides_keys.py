"""Key paths against a small schema written out here, descriptions and nearest keys against the real ones."""

import pytest

from exlm_cli.config.base import StrictModel
from exlm_cli.config.load import KINDS
from exlm_cli.config.overrides import child_keys, find_field, key_paths, nearest_key
from exlm_cli.config.pretrain import PretrainRecipe


class Inner(StrictModel):
    depth: int = 1


class Section(StrictModel):
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner | None = Inner()


class Schema(StrictModel):
    name: str = "x"
    section: Section = Section()


def test_every_key_is_listed_sections_before_their_keys():
    assert list(key_paths(Schema)) == ["name", "section", "section.pair", "section.inner", "section.inner.depth"]


@pytest.mark.parametrize("path", ["nome", "name.x", "section.none", "section.inner.depth.x"])
def test_a_path_that_leads_nowhere_has_no_field(path):
    assert find_field(Schema, path) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_recipe_is_described(kind):
    for path in key_paths(kind):
        field = find_field(kind, path)
        assert field is not None
        assert field.description or child_keys(kind, path), f"`{path}` has no description"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("masking.mask_porb", "masking.mask_ratio"),
        ("mask_ratio", "masking.mask_ratio"),
        ("train.lr", "optim.lr"),
        ("model.num_layer", "model.num_layers"),
        ("max_stps", "train.max_steps"),
        ("model.transition.headz", "model.transition.heads"),
        ("zzz", None),
        ("masking.qqqq", None),
    ],
)
def test_the_nearest_key_is_what_was_meant(given, meant):
    assert nearest_key(PretrainRecipe, given) == meant
