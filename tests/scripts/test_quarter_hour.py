"""Work away from the data: steps are timed; what is packed, trained elsewhere and brought back is a run."""

import argparse
import json
import os
import shutil
import signal
import tarfile
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import quarter_hour
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.progress import SilentProgress
from exlm_cli.train.checkpoint import checkpoint_paths
from exlm_cli.train.pretrain_task import PretrainTask
from exlm_cli.train.pretrained import load_pretrained
from quarter_hour import Probe
from tests.killed import act_at_call
from tests.tiny import tiny_recipe

pytestmark = pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="needs tarfile's filters, of Python 3.11.4")


def test_what_is_trained_elsewhere_comes_back_as_a_run_also_from_where_it_was_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(quarter_hour, "FOLDER", tmp_path / "packed")
    monkeypatch.setattr(quarter_hour, "fetch_wheels", lambda folder: folder.mkdir(exist_ok=True))  # no network
    monkeypatch.setattr(quarter_hour, "PART_BYTES", 4_000)  # several files
    monkeypatch.setattr(quarter_hour, "equal_steps", lambda probes, _: [6] * len(probes))
    data = {"bundled_rows": 200, "cache_dir": str(tmp_path / "cache")}
    recipe = tiny_recipe(data=data, train={"batch_sequences": None, "batch_tokens": 128})
    here = prepare_data(recipe, progress=SilentProgress())
    quarter_hour.pack(recipe.data.kind, recipe)
    quarter_hour.lay_out(recipe.data.kind, tmp_path / "there")
    there = quarter_hour.read_data(recipe, tmp_path / "there")
    for mine, theirs in ((here.train, there.train), (here.valid, there.valid)):
        assert len(mine) == len(theirs) > 0
        assert all((mine[index] == theirs[index]).all() for index in range(len(mine)))
    assert (there.tokenizer.fingerprint, there.fingerprint) == (here.tokenizer.fingerprint, here.fingerprint)

    (tmp_path / "tiny.yaml").write_text(dump_recipe(recipe))
    shutil.rmtree(tmp_path / "cache")  # what the data were made of is not there
    arguments = argparse.Namespace(
        recipe=tmp_path / "tiny.yaml", data=tmp_path / "there", seconds=0, run=tmp_path / "trained",
        out=tmp_path / "out", probe_steps=2, gate=tmp_path / "gate", peers=1, set=[],
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        # the eighth batch after the two steps of the probe is in the training
        stop = Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        act_at_call(PretrainTask, "losses", 8, stop, set_to=patch.setattr)
        assert not quarter_hour.train(arguments)
    (run,) = quarter_hour.unpack(arguments.out, tmp_path / "cut-off")
    assert 0 < load_pretrained(run, device="cpu").step < 6
    monkeypatch.setattr(quarter_hour, "probe", Mock(side_effect=AssertionError))
    assert quarter_hour.train(arguments)
    assert len(list(arguments.out.glob("tiny.tar.*-of-*"))) > 9  # more than sort as their names do
    (run,) = quarter_hour.unpack(arguments.out, tmp_path / "whole")
    before = load_file(checkpoint_paths(arguments.run)[0] / "model.safetensors")
    found = load_pretrained(run, device="cpu")
    assert found.step == load_recipe(run / "recipe.yaml").train.max_steps == 6
    assert found.model.state_dict().keys() == before.keys()
    for name, tensor in found.model.state_dict().items():
        assert torch.equal(tensor, before[name].half().float()), name
    rounding = json.loads((run / "rounding.json").read_text())
    assert rounding["float16"]["loss"] == pytest.approx(rounding["trained"]["loss"], rel=1e-3)
    next(arguments.out.glob("tiny.tar.7-of-*")).unlink()
    with pytest.raises(SystemExit, match="parts of tiny are missing"):
        quarter_hour.unpack(arguments.out, tmp_path / "again")


@pytest.mark.parametrize(
    ("probes", "expected"),
    [
        ([Probe(0.5, 100.0, 990.0, 1100.0)], [190]),
        # at its pace the second takes 200 * 1.5 * 0.4 = 120 s for what the first does in 100 s
        ([Probe(0.5, 150.0, 990.0, 1100.0), Probe(0.4, 100.0, 1000.0, 1100.0)], [158, 237]),
        ([Probe(0.5, 100.0, 1000.0, 1050.0), Probe(0.5, 100.0, 990.0, 1100.0)], [95, 95]),
        ([Probe(10.0, 100.0, 1000.0, 1001.0)], [2]),
    ],
)
def test_trainings_side_by_side_end_with_the_same_flops_within_their_time(probes, expected):
    """They begin at the moment 1,000 s; 5 % of the time is spare."""
    steps = quarter_hour.equal_steps(probes, 1000.0)
    assert steps == expected
    for probe, num_steps in zip(probes, steps, strict=True):
        assert num_steps == 2 or num_steps * probe.step_s <= 0.95 * (probe.until_s - 1000.0)
        assert probe.flops * num_steps == pytest.approx(probes[0].flops * steps[0], rel=0.01)
