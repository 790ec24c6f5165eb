"""Key paths and what each accepts, against a small schema written out here and against the real one."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from exlm_cli.config.base import Recipe, StrictModel
from exlm_cli.config.keys import (
    child_keys,
    describe_accepted,
    find_field,
    key_paths,
    nearest_key,
)
from exlm_cli.config.load import KINDS
from exlm_cli.config.pretrain import PretrainRecipe


class Inner(StrictModel):
    depth: int = Field(1, ge=1, le=9)


class Section(StrictModel):
    ratio: float = Field(0.5, gt=0, lt=1)
    steps: int | None = Field(None, ge=1)
    kind: Literal["a", "b"] = "a"
    files: tuple[str, ...] = ()
    ratios: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field((0.5,), min_length=1)
    cells: tuple[tuple[Annotated[int, Field(ge=1)], float], ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    is_on: bool = False
    inner: Inner = Inner()


class Schema(StrictModel):
    name: str = Field("x", pattern="^[a-z]+$")
    section: Section = Section()


def test_every_key_is_listed_sections_before_their_keys() -> None:
    assert list(key_paths(Schema)) == [
        "name", "section", "section.ratio", "section.steps", "section.kind", "section.files", "section.ratios",
        "section.cells", "section.pair", "section.is_on", "section.inner", "section.inner.depth",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["nome", "name.x", "section.none", "section.inner.depth.x"])
def test_a_path_that_leads_nowhere_has_no_field(path: str) -> None:
    assert find_field(Schema, path) is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("name", "a text matching `^[a-z]+$`"),
        ("section", "a section of keys"),
        ("section.ratio", "a number above 0 and below 1"),
        ("section.steps", "a whole number at least 1, or null"),
        ("section.kind", "one of `a`, `b`"),
        ("section.files", "a list like [a, b], each a text"),
        ("section.ratios", "a list like [a, b], each a number above 0 and below 1, not empty"),
        ("section.cells", "a list like [a, b], each [a whole number at least 1, a number]"),
        ("section.pair", "2 values in brackets, each a number"),
        ("section.is_on", "true or false"),
        ("section.inner.depth", "a whole number at least 1 and at most 9"),
    ],
)
def test_what_a_key_accepts_is_said_in_words(path: str, words: str) -> None:
    field = find_field(Schema, path)
    assert field is not None
    assert describe_accepted(field) == words


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_recipe_can_be_described(kind: type[Recipe]) -> None:
    for path in key_paths(kind):
        field = find_field(kind, path)
        assert field is not None
        assert describe_accepted(field)
        assert field.description or child_keys(kind, path), f"`{path}` says nothing of itself"


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
def test_the_nearest_key_is_what_was_meant(given: str, meant: str | None) -> None:
    assert nearest_key(PretrainRecipe, given) == meant
