"""Runs whose files do not belong together or are damaged: each command refuses them in one line that names the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.unit.finetune.synthetic import sign


@pytest.fixture
def copied(folder: Path, made: Path) -> Path:
    """Return the current directory, with copies of the runs of `made` under one-letter names."""
    for name, target in {"M": "molecules/run", "P": "smiles/pretrained", "T": "text"}.items():
        shutil.copytree(made / target, folder / name)
    (folder / "new.csv").write_text("mol\nCCO\n")
    (folder / "rows.csv").write_text("mol,active\n" + "".join(f"{'C' * n}O,1\n{'C' * n}N,0\n" for n in range(1, 21)))
    return folder


def swap_two_ids(tokenizer: Path) -> None:
    """Exchange the ids of the last two words of a vocabulary: the weights still fit, the words do not."""
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(content))


READERS = {
    "eval P": "P",
    "embed P new.csv --out v.npz --smiles-column mol": "P",
    "embed M new.csv --out v.npz --smiles-column mol": "M",
    "predict M new.csv": "M",
    "inspect-dag C[MASK]O --checkpoint P": "P",
    "finetune csv rows.csv --checkpoint P --smiles-column mol --label-columns active --split random": "P",
    "finetune --resume M": "M",
}
"""Commands that read a run, and which one."""


@pytest.mark.parametrize("words", READERS)
def test_permuted_ids_in_a_tokenizer_are_refused_by_every_reader(words, copied, capsys):
    run = READERS[words]
    swap_two_ids(copied / run / "tokenizer.json")
    assert f"{run}/tokenizer.json: the tokenizer in it is not the one that " in refusal_of(capsys, *words.split())


@pytest.mark.parametrize(("file", "old", "new"), [("encoder.yaml", "mask_ratio: 0.3", "mask_ratio: 0.4"),
                                                  ("recipe.yaml", "dropout: 0.1", "dropout: 0.2"),
                                                  ("recipe.yaml", "label_kind: auto", "label_kind: classes"),
                                                  ("recipe.yaml", "canonical_smiles: true", "canonical_smiles: false"),
                                                  ])  # fmt: skip
def test_a_recipe_changed_beside_a_fine_tuned_run_is_refused(file, old, new, copied, capsys):
    path = copied / "M" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert f"M/{file}: the " in refusal_of(capsys, "predict", "M", "new.csv")


def test_a_resumed_run_refuses_permuted_ids_and_finds_its_lost_metrics_and_the_cache_heals(folder, tiny, capsys):
    """The run's own file is refused; a permuted copy in the cache is trained again for the next run.

    The figures of the last validation are in the checkpoint.
    """
    run = folder / "run"
    result = result_of(capsys, "pretrain", "--recipe", "quickstart-text", "--out", "run", *tiny)
    (run / "metrics.jsonl").unlink()
    assert result_of(capsys, "pretrain", "--resume", "run")["metrics"] == result["metrics"]
    whole = (run / "tokenizer.json").read_bytes()
    swap_two_ids(run / "tokenizer.json")
    assert "run/tokenizer.json: " in refusal_of(capsys, "pretrain", "--resume", "run")
    (run / "tokenizer.json").write_bytes(whole)
    (cached,) = (run.parents[1] / "cache" / "tokenizers").glob("*.json")
    swap_two_ids(cached)
    said = printed_by(capsys, ["pretrain", "--recipe", "quickstart-text", "--out", "again", *tiny]).err
    assert f"{cached}: " in " ".join(said.split())
    assert cached.read_bytes() == (run / "tokenizer.json").read_bytes() == whole


def change_state(checkpoint: Path, **loop: object) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    state["loop"] |= loop
    (checkpoint / "state.json").write_text(json.dumps(state))


def as_integers(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    save_file({name: tensor.long() for name, tensor in load_file(file).items()}, file)


def endless_seconds(checkpoint: Path) -> None:
    file = checkpoint / "state.json"
    file.write_text(file.read_text().replace('"elapsed_s": 0.0', '"elapsed_s": 1e999'))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no safetensors": (lambda path: (path / "model.safetensors").write_bytes(b"x"), "header too small"),
    "header too long": (
        lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"), "header too large",
    ),
    "integers": (as_integers, "is torch.int64 of shape"),
    "another step": (lambda path: change_state(path, step=2), "it is of step 2"),
    "too large a step": (lambda path: change_state(path, step=10**30), "`loop.step` is 1000"),
    "a negative count": (lambda path: change_state(path, step_in_epoch=-1), "`loop.step_in_epoch` is -1"),
    "a text": (lambda path: change_state(path, elapsed_s="long"), "`loop.elapsed_s` is 'long'"),
    "no best": (lambda path: change_state(path, is_stopped=True), "`best_step` and `best_epoch` do not fit"),
    "too large": (endless_seconds, "a number in it is too large"),
    "brackets": (lambda path: (path / "state.json").write_text("[" * 100_000), "not readable as JSON"),
    "NUL": (lambda path: change_state(path, best_value="\0"), "a text in it has a NUL character"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_content_that_does_not_fit_is_refused_although_its_hash_does(damage, reason, copied, capsys):
    checkpoint = copied / "P" / "checkpoints" / "step-3"
    damage(checkpoint)
    sign(checkpoint)
    error, hint = refusal_of(capsys, "inspect-dag", "C[MASK]O", "--checkpoint", "P").split("\n")
    assert error.startswith("error: P/checkpoints/step-3/")
    assert reason in error
    assert hint.startswith("hint: ")


def test_a_tokenizer_that_panics_or_needs_endless_memory_is_refused(copied, capsys):
    path = copied / "T" / "tokenizer.json"
    whole = json.loads(path.read_text())
    panics, endless = json.loads(path.read_text()), whole
    panics["model"]["continuing_subword_prefix"] = "abcdefgh"
    endless["model"]["vocab"]["amber birch"] = 2**32 - 1
    for content, reason in ((panics, "the tokenizer does not work: "), (endless, "the highest id is 4294967295")):
        path.write_text(json.dumps(content))
        said = refusal_of(capsys, "inspect-dag", "amber [MASK] cedar", "--checkpoint", "T")
        assert f"error: T/tokenizer.json: {reason}" in said
