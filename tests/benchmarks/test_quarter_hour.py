"""Training away from the data: what is packed, trained elsewhere and brought back is a run that commands read."""

import argparse
import json
import shutil
import tarfile

import pytest
import torch
from safetensors.torch import load_file

import quarter_hour
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.progress import SilentProgress
from exlm_cli.train.checkpoint import checkpoint_paths
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import tiny_recipe

pytestmark = pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="needs tarfile's filters, of Python 3.11.4")


def pack(tmp_path, monkeypatch, **sections):
    """Return a recipe, its data here, and its packed data laid out elsewhere."""
    monkeypatch.setattr(quarter_hour, "FOLDER", tmp_path / "packed")
    monkeypatch.setattr(quarter_hour, "fetch_wheels", lambda folder: folder.mkdir(exist_ok=True))  # no network
    data = {"bundled_rows": 200, "cache_dir": str(tmp_path / "cache"), **sections.pop("data", {})}
    recipe = tiny_recipe(data=data, train={"batch_sequences": None, "batch_tokens": 128}, **sections)
    prepared = prepare_data(recipe, progress=SilentProgress())
    quarter_hour.pack(recipe.data.kind, recipe)
    quarter_hour.lay_out(recipe.data.kind, tmp_path / "there")
    return recipe, prepared, tmp_path / "there"


@pytest.fixture
def packed(tmp_path, monkeypatch):
    return pack(tmp_path, monkeypatch)


def test_shards_are_the_same_elsewhere(packed):
    recipe, data, there = packed
    read = quarter_hour.read_data(recipe, there)
    for mine, theirs in ((data.train, read.train), (data.valid, read.valid)):
        assert len(mine) == len(theirs) > 0
        assert all((mine[index] == theirs[index]).all() for index in range(len(mine)))
    assert read.tokenizer.fingerprint == data.tokenizer.fingerprint
    assert read.fingerprint == data.fingerprint


def test_other_spellings_are_the_same_elsewhere(tmp_path, monkeypatch):
    molecules = {"kind": "smiles", "train": ["bundled:molecules"], "sequence_length": 80, "num_spellings": 2}
    recipe, data, there = pack(tmp_path, monkeypatch, data=molecules, model={"max_length": 256})
    read = quarter_hour.read_data(recipe, there)
    for mine, theirs in ((data.train, read.train), (data.valid, read.valid), (data.spellings, read.spellings)):
        assert mine.tokens.tolist() == theirs.tokens.tolist() != []
        assert mine.offsets.tolist() == theirs.offsets.tolist()


def test_shards_of_other_settings_are_refused(packed):
    recipe, _, there = packed
    other = tiny_recipe(data={**recipe.data.model_dump(), "sequence_length": 12})
    with pytest.raises(SystemExit, match="pack them again"):
        quarter_hour.read_data(other, there)


def test_what_comes_back_is_a_run(packed, tmp_path, monkeypatch):
    recipe, _, there = packed
    (tmp_path / "tiny.yaml").write_text(dump_recipe(recipe))
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(quarter_hour, "PART_BYTES", 16_000)  # several files
    trained, out = tmp_path / "trained", tmp_path / "out"
    arguments = argparse.Namespace(
        recipe=tmp_path / "tiny.yaml", data=there, seconds=0, run=trained, out=out,
        probe_steps=2, gate=tmp_path / "gate", peers=1, set=[],
    )  # fmt: skip
    quarter_hour.train(arguments)
    assert len(list(out.glob("tiny-*-of-*.safetensors"))) > 1
    (run,) = quarter_hour.unpack(out, tmp_path / "runs")
    before = load_file(checkpoint_paths(trained)[0] / "model.safetensors")
    found = load_pretrained(run, device="cpu")
    assert found.step == 2
    assert found.model.state_dict().keys() == before.keys()
    for name, tensor in found.model.state_dict().items():
        assert torch.equal(tensor, before[name].half().float()), name
    rounding = json.loads((run / "rounding.json").read_text())
    assert rounding["float16"]["loss"] == pytest.approx(rounding["trained"]["loss"], rel=1e-3)
    assert load_recipe(run / "recipe.yaml").train.max_steps == 2
