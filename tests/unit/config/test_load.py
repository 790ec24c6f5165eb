"""Recipes by name and file, `extends`, `--set`, and the round trip through YAML. Messages are matched whole."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_cli.config import load
from exlm_cli.config.base import Recipe
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import KINDS, dump_recipe, list_recipes, load_recipe, recipe_kind, recipes_folder
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import ConfigError
from tests.tiny import tiny_recipe

LIST_HINT = "`exlm recipes` lists the recipes; a file is given by its path, like `./mine.yaml`"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
QUICKSTART = "recipes/pretrain/quickstart/quickstart-text.yaml"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def error_of(name: Any, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(name), overrides)
    assert "\n" not in caught.value.message
    return caught.value


def test_a_recipe_is_found_by_name_and_called_by_it() -> None:
    assert load_recipe("quickstart-text").name == "quickstart-text"


def test_a_file_is_found_by_path_and_called_by_its_stem(tmp_path: Path) -> None:
    recipe = load_recipe(str(write(tmp_path / "mine.yaml", "extends: quickstart-text\nseed: 7\n")))
    assert (recipe.name, recipe.seed, recipe.purpose) == ("mine", 7, "")
    assert recipe.model == load_recipe("quickstart-text").model


@pytest.mark.parametrize(
    ("file", "name"),
    [("Text_v2.yaml", "text_v2"), ("My run (3).yaml", "my-run-3"), ("_x.yml", "x"), ("ß.yaml", "recipe")],
)
def test_a_file_whose_stem_names_no_folder_is_called_by_what_is_left_of_it(
    tmp_path: Path, file: str, name: str
) -> None:
    path = write(tmp_path / file, "extends: quickstart-text\n")
    assert load_recipe(str(path)).name == name
    extended = write(tmp_path / "variants.yaml", f"extends: quickstart-ablations\npretrain: {{extends: '{file}'}}\n")
    assert load_recipe(str(extended), kind=SweepRecipe).pretrain.name == name


def test_extends_goes_through_files_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "base.yaml", "extends: quickstart-text\noptim: {lr: 1e-4, warmup_steps: 7}\nname: called\n")
    write(tmp_path / "child.yaml", "extends: base.yaml\noptim: {lr: 2e-4}\n")
    monkeypatch.chdir("/")
    recipe = load_recipe(str(tmp_path / "child.yaml"))
    assert (recipe.name, recipe.optim.lr, recipe.optim.warmup_steps) == ("child", 2e-4, 7)


def test_a_circle_of_extends_is_refused_with_its_chain(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write(a, "extends: ./b.yaml")
    write(b, "extends: a.yaml")
    error = error_of(a)
    assert error.message == f"`extends` goes in a circle: {a} -> {b} -> {a}"
    assert error.hint == "remove `extends` from one of them"


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("[a]", "`extends` is ['a']; accepted: the name of a recipe, or a file beside this one"),
        ("quickstart-txt", "`extends`: unknown recipe `quickstart-txt`"),
        ("no.yaml", "`extends`: recipe file {folder}/no.yaml does not exist"),
    ],
)
def test_an_extends_that_leads_nowhere_is_told_with_its_file(tmp_path: Path, extends: str, message: str) -> None:
    path = write(tmp_path / "mine.yaml", f"extends: {extends}\n")
    assert error_of(path).message == f"{path}: {message.format(folder=tmp_path)}"


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    error = error_of("quikstart-text")
    assert error.message == "unknown recipe `quikstart-text`"
    assert error.hint == f"did you mean `quickstart-text`? {LIST_HINT}"
    assert error_of("zzzzzz").hint == LIST_HINT


def test_a_file_that_is_missing_or_a_folder_is_told(tmp_path: Path) -> None:
    assert error_of(tmp_path / "no.yaml").message == f"recipe file {tmp_path / 'no.yaml'} does not exist"
    error = error_of(tmp_path)
    assert (error.message, error.hint) == (f"{tmp_path} is a directory; a recipe is a YAML file", LIST_HINT)
    write(tmp_path / "recipe.yaml", "")
    assert error_of(tmp_path).hint == f"the recipe of that run is {tmp_path / 'recipe.yaml'}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty; a recipe is a mapping of sections"),
        (b"- a\n", "the file is a list; a recipe is a mapping of sections"),
        (b"seed: 1\nseed: 2\n", "line 2, column 1: key `seed` is given a second time"),
        (b"seed: [1\n", "line 2, column 1: expected ',' or ']', but got '<stream end>'"),
        (b"\x7fELF\xff\x00", "not a text file: byte 4 is not UTF-8"),
        (b"seed: \x00\n", 'unacceptable character #x0000: special characters are not allowed in "<unicode string>", '
                          "position 6"),
        (b"masking: {mask_porb: 0.3}\n", "unknown key `masking.mask_porb`"),
        (b"seed: -1\n", "`seed` is -1; accepted: a whole number at least 0 and below 9223372036854775808"),
        (b"objective: exlm\n", "`data` is missing; accepted: a section of keys"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_told_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert error_of(path).message == f"{path}: {message}"


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mine.yaml", "seed: 1")

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert error_of(path).message == f"{path}: the recipe cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optim.lr=1e-4", "optim", "lr", 1e-4),
        ("optim.betas=[0.8, 0.9]", "optim", "betas", (0.8, 0.9)),
        ("train.max_steps=1e3", "train", "max_steps", 1000),
        ("data.column=no", "data", "column", "no"),
        ("data.column=", "data", "column", None),
        ("data.column=a=b", "data", "column", "a=b"),
        ("data.train=corpus/*.txt", "data", "train", ("corpus/*.txt",)),
        ("data.train=*.txt", "data", "train", ("*.txt",)),
        ('data.train=["a.txt", b.txt]', "data", "train", ("a.txt", "b.txt")),
        ("masking={mask_ratio: 0.3}", "masking", "mask_ratio", 0.3),
        (" optim.lr =1e-4", "optim", "lr", 1e-4),
        ("data.train=take #2/a.txt", "data", "train", ("take #2/a.txt",)),
        ("data.train=#2.txt", "data", "train", ("#2.txt",)),
        ('data.train=["take #2/a.txt"]', "data", "train", ("take #2/a.txt",)),
    ],
)
def test_set_is_typed_by_yaml(override: str, section: str, key: str, value: Any) -> None:
    recipe = load_recipe("quickstart-text", [override])
    read = getattr(getattr(recipe, section), key)
    assert read == value
    assert type(read) is type(value)


def test_a_later_set_wins_and_others_stay() -> None:
    recipe = load_recipe("quickstart-text", ["optim.lr=1e-4", "optim.lr=1e-5"])
    assert recipe.optim.lr == 1e-5
    assert recipe.optim.warmup_steps == load_recipe("quickstart-text").optim.warmup_steps


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("foo", "override `foo` is not of the form section.key=value", "for example `masking.mask_ratio=0.3`"),
        ("=1", "override `=1` is not of the form section.key=value", "for example `masking.mask_ratio=0.3`"),
        (
            "masking.mask_porb=1",
            "override `masking.mask_porb=1`: unknown key `masking.mask_porb`",
            "did you mean `masking.mask_ratio`?",
        ),
        (
            "optim.betas=[0.9",
            "override `optim.betas=[0.9`: the value is not YAML: line 1, column 5: expected ',' or ']', but got "
            "'<stream end>'",
            "lists are written [a, b]; put the whole of `key=value` in quotes for the shell",
        ),
        (
            "masking.mask_ratio=2",
            "override `masking.mask_ratio=2`: `masking.mask_ratio` is 2; accepted: a number above 0 and below 1",
            "`masking.mask_ratio`: Share of real tokens masked, per sequence",
        ),
    ],
)
def test_a_wrong_set_is_told_with_its_own_words(override: str, message: str, hint: str) -> None:
    error = error_of("quickstart-text", override)
    assert (error.message, error.hint) == (message, hint)


@pytest.mark.parametrize(
    ("overrides", "described"),
    [
        (["seed=2", "train.batch_tokens=500"], "override `train.batch_tokens=500`"),
        (["train={batch_tokens: 500}", "name=" + "x" * 200, "seed=2"], "override `train={batch_tokens: 500}`"),
    ],
)
def test_values_that_do_not_go_together_name_the_recipe_and_the_set_at_fault(
    overrides: list[str], described: str
) -> None:
    assert error_of("quickstart-text", *overrides).message == (
        f"{QUICKSTART} with {described}: give exactly one of `train.batch_sequences` and `train.batch_tokens`"
    )


def test_sets_that_none_is_known_of_to_be_at_fault_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "extends: quickstart-text\ntrain: {batch_tokens: 500}\n")
    said = "give exactly one of `train.batch_sequences` and `train.batch_tokens`"
    assert error_of(path).message == f"{path}: {said}"
    assert error_of(path, "seed=2").message == f"{path} with override `seed=2`: {said}"
    assert error_of(path, "seed=2", "optim.lr=0.1").message == f"{path} with 2 overrides: {said}"


def test_a_set_of_any_length_is_told_in_a_short_line() -> None:
    files = ", ".join(f"part-{number}.txt" for number in range(1000))
    message = error_of("quickstart-text", f"data.trains=[{files}]").message
    shown = f"data.trains=[{files}"[:97]
    assert message == f"override `{shown}...`: unknown key `data.trains`"


def test_recipes_are_found_inside_an_installed_package_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_top = recipes_folder()
    assert (at_top / "README.md").is_file()
    package = tmp_path / "exlm_cli"
    (package / "config").mkdir(parents=True)
    (package / "recipes").symlink_to(at_top)
    monkeypatch.setattr(load, "__file__", str(package / "config" / "load.py"))
    assert recipes_folder() == package / "recipes"
    assert load_recipe("quickstart-text").name == "quickstart-text"


def test_listed_recipes_have_their_names_and_begin_with_the_smallest_kind() -> None:
    listed = list_recipes()
    assert listed[0].name.startswith("quickstart-")
    assert all(info.recipe == load_recipe(info.name) and info.path.stem == info.name for info in listed)


def kind_error_of(name: Any, kind: type[Recipe]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(name), kind=kind)
    return caught.value


def test_a_shipped_recipe_of_another_kind_is_told_so() -> None:
    error = kind_error_of("moleculenet-bace", PretrainRecipe)
    assert error.message == "`moleculenet-bace` is a recipe of `exlm finetune`, not of `exlm pretrain`"
    assert error.hint == f"`quickstart-text` is one of `exlm pretrain`; {LIST_HINT}"
    assert kind_error_of("text-base", FinetuneRecipe).message == (
        "`text-base` is a recipe of `exlm pretrain`, not of `exlm finetune`"
    )


def test_a_file_of_another_kind_is_told_so_and_one_that_extends_it_too(tmp_path: Path) -> None:
    path = write(tmp_path / "recipe.yaml", dump_recipe(load_recipe("moleculenet-bace", kind=FinetuneRecipe)))
    message = f"{path} is a recipe of `exlm finetune`, not of `exlm pretrain`"
    assert kind_error_of(path, PretrainRecipe).message == message
    child = write(tmp_path / "child.yaml", "extends: text-small\n")
    assert kind_error_of(child, FinetuneRecipe).message == (
        f"{child}: `extends`: `text-small` is a recipe of `exlm pretrain`, not of `exlm finetune`"
    )


def test_a_misspelt_section_is_no_other_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "extends: text-small\nmaskin: {}\n")
    assert kind_error_of(path, PretrainRecipe).hint == "did you mean `masking`?"


def test_the_kind_of_a_recipe_is_told_by_its_name_or_its_keys(tmp_path: Path) -> None:
    assert recipe_kind("text-base") is PretrainRecipe
    assert recipe_kind("csv") is FinetuneRecipe
    assert recipe_kind(str(write(tmp_path / "a.yaml", "extends: csv\nseeds: [4]\n"))) is FinetuneRecipe
    assert recipe_kind(str(write(tmp_path / "b.yaml", "name: x\n"))) is PretrainRecipe


def test_names_are_unique_over_all_kinds() -> None:
    names = [info.name for kind in KINDS for info in list_recipes(kind)]
    assert len(names) == len(set(names))


def test_a_list_of_a_grid_is_set_by_its_key() -> None:
    recipe = load_recipe("csv", ["grid.optim.lr=[1e-4, 1e-3]", "grid.train.max_epochs=[3]"], kind=FinetuneRecipe)
    assert recipe.grid == {"optim.lr": (1e-4, 1e-3), "train.max_epochs": (3,)}
    assert load_recipe("csv", ["grid={optim.lr: [0.1]}"], kind=FinetuneRecipe).grid == {"optim.lr": (0.1,)}


@st.composite
def recipes(draw: st.DrawFn) -> PretrainRecipe:
    """Draw the values whose YAML is delicate: floats of every size, texts, lists, nothing."""
    optional_text = st.none() | TEXTS
    return tiny_recipe(
        purpose=draw(TEXTS),
        seed=draw(st.integers(0, 2**63 - 1)),
        data={
            "train": draw(st.lists(TEXTS)),
            "column": draw(optional_text),
            "cache_dir": draw(optional_text),
            "valid_fraction": draw(st.floats(0, 0.5, exclude_min=True, exclude_max=True)),
        },
        optim={
            "lr": draw(st.floats(0, 1, exclude_min=True)),
            "eps": draw(st.floats(0, 1e-2, exclude_min=True)),
            "end_lr": draw(st.floats(0, 1)),
            "betas": draw(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)),
        },
        train={"compile": draw(st.booleans()), "num_threads": draw(st.none() | st.integers(1, 1024))},
    )


@settings(deadline=None)
@given(recipe=recipes())
def test_a_dumped_recipe_is_read_back_as_the_same_recipe(recipe: PretrainRecipe, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("dumped") / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8", newline="")
    assert load_recipe(str(path)) == recipe
