"""Exported folders follow the conventions of transformers and sentence-transformers, whatever version is installed."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from exlm_cli.api.run import load
from exlm_cli.export.folder import write_model
from exlm_cli.export.source import Source, finetuned_source, pretrained_source
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import CHAIN
from tests.unit.finetune.finetuned_runs import words_run
from tests.unit.finetune.synthetic import make_pretrained

transformers = pytest.importorskip("transformers")
KINDS = ("input", "chain", "task")
TEXTS = ["amber birch fern daisy", "cedar"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Source, Path]]:
    """Return a model of each kind and the folder that it is exported to."""
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        model = {"num_layers": 2, "init_std": 0.1, **(CHAIN if kind == "chain" else {})}
        run = make_pretrained(folder / "run", model=model)
        if kind == "task":
            (folder / "tuned").mkdir()
            source = finetuned_source(load_finetuned(words_run(folder / "tuned", run, "colour", (1,)), device="cpu"))
        else:
            source = pretrained_source(load_pretrained(run, device="cpu"))
        (folder / "out").mkdir()
        write_model(source, folder / "out")
        made[kind] = source, folder / "out"
    return made


@contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect what transformers warns of; Python's warnings are errors."""
    found: list[str] = []
    caplog.clear()
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield found
    finally:
        library.removeHandler(caplog.handler)
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        found += [line for line in said if not line.startswith("Device set to use")]  # of version 4 on every pipeline


@pytest.mark.parametrize("kind", KINDS)
def test_the_classes_of_transformers_load_a_folder_without_code_and_save_it_again(folders, kind, tmp_path):
    """The outputs are the same, so the frequencies of `rope: 2d` are too, which the config does not tell."""
    source, folder = folders[kind]
    assert not list(folder.rglob("*.py"))
    assert "auto_map" not in (folder / "config.json").read_text(encoding="utf-8")
    options = {} if source.has_head else {"add_pooling_layer": False}
    outputs = []
    for path in (folder, tmp_path / "again"):
        model = getattr(transformers, source.class_name).from_pretrained(path, **options).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        with torch.no_grad():
            outputs.append(model(**tokenizer(TEXTS, padding=True, return_tensors="pt"))[0])
        model.save_pretrained(tmp_path / "again")
        tokenizer.save_pretrained(tmp_path / "again")
    assert torch.equal(*outputs)


def test_a_pipeline_fills_masks_by_path_without_warnings(folders, caplog):
    source, folder = folders["chain"]
    with logged(caplog) as warned:
        fill = transformers.pipeline("fill-mask", model=str(folder), device="cpu")
        found = fill("amber [MASK] fern", top_k=source.tokenizer.vocab_size)
    assert warned == []
    ids = source.encode("amber [MASK] fern")
    ours = source.outputs(ids)[ids.index(source.tokenizer.mask_id)].softmax(-1)
    theirs = {word["token"]: word["score"] for word in found}
    np.testing.assert_allclose([theirs[token] for token in range(len(ours))], ours.numpy(), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers_gives_the_vectors_of_embed(folders, kind, tmp_path):
    """In a batch of several lengths, and for a text that is too long."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    source, folder = folders[kind]
    texts = [*TEXTS, "elder " * 100]
    encoder = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert encoder.max_seq_length == source.sequence_length
    ours = load(source.run, device="cpu").embed(texts).mean
    assert float(np.abs(ours).max()) > 0.1
    np.testing.assert_allclose(encoder.encode(texts), ours, atol=1e-6)
