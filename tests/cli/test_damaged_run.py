"""Runs whose files do not belong together or are damaged: each command refuses them in one line that names the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.asserts import refusal_of
from tests.cli.conftest import own_copy
from tests.unit.finetune.synthetic import sign

pytestmark = pytest.mark.usefixtures("run_folder")


@pytest.mark.parametrize(
    ("run", "words"),
    [("P", "eval P"), ("M", "predict M new.csv"), ("M", "finetune --resume M")],
)
def test_permuted_ids_in_a_tokenizer_are_refused(run, words, folder, capsys):
    """The weights fit, but the ids are of other words. Unit tests show that `exlm pretrain --resume` refuses them."""
    (folder / "new.csv").write_text("mol\nCCO\n")
    tokenizer = own_copy(folder, run) / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(content))
    assert f"{run}/tokenizer.json: the tokenizer in it is not the one that " in refusal_of(capsys, *words.split())


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("encoder.yaml", "mask_ratio: 0.3", "mask_ratio: 0.4"),
        ("recipe.yaml", "dropout: 0.1", "dropout: 0.2"),
        ("recipe.yaml", "canonical_smiles: true", "canonical_smiles: false"),
    ],
)
def test_a_recipe_changed_beside_a_fine_tuned_run_is_refused(file, old, new, folder, capsys):
    (folder / "new.csv").write_text("mol\nCCO\n")
    path = own_copy(folder, "M") / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert f"M/{file}: the " in refusal_of(capsys, "predict", "M", "new.csv")


def change_state(checkpoint: Path, **loop: object) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    state["loop"] |= loop
    (checkpoint / "state.json").write_text(json.dumps(state))


def as_integers(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    save_file({name: tensor.long() for name, tensor in load_file(file).items()}, file)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "header too long": (
        lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"), "header too large",
    ),
    "integers": (as_integers, "is torch.int64 of shape"),
    "another step": (lambda path: change_state(path, step=2), "it is of step 2"),
    "too large a step": (lambda path: change_state(path, step=10**30), "`loop.step` is 1000"),
    "no best": (lambda path: change_state(path, is_stopped=True), "`best_step` and `best_epoch` do not fit"),
    "endless": (lambda path: change_state(path, elapsed_s=1e999), "a number in it is too large"),
    "brackets": (lambda path: (path / "state.json").write_text("[" * 100_000), "not readable as JSON"),
    "NUL": (lambda path: change_state(path, best_value="\0"), "a text in it has a NUL character"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_content_that_does_not_fit_is_refused_although_its_hash_does(damage, reason, folder, capsys):
    checkpoint = own_copy(folder, "P") / "checkpoints" / "step-3"
    damage(checkpoint)
    sign(checkpoint)
    error, hint = refusal_of(capsys, "inspect-dag", "C[MASK]O", "--checkpoint", "P").split("\n")
    assert error.startswith("error: P/checkpoints/step-3/")
    assert reason in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"continuing_subword_prefix": "abcdefgh"}, "the tokenizer does not work: "),
        ({"vocab": {"amber birch": 2**32 - 1}}, "the highest id is 4294967295"),
    ],
)
def test_a_tokenizer_that_panics_or_needs_endless_memory_is_refused(changes, reason, folder, capsys):
    path = own_copy(folder, "T") / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= changes | {"vocab": content["model"]["vocab"] | changes.get("vocab", {})}
    path.write_text(json.dumps(content))
    said = refusal_of(capsys, "inspect-dag", "amber [MASK] cedar", "--checkpoint", "T")
    assert f"error: T/tokenizer.json: {reason}" in said
