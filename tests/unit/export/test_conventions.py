"""Exported folders follow the conventions of transformers and sentence-transformers, whatever version is installed."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exlm_cli.api import load
from exlm_cli.export.folder import write_model
from exlm_cli.export.source import Source, finetuned_source, pretrained_source
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import OUTPUT
from tests.unit.finetune.finetuned_runs import words_run
from tests.unit.finetune.synthetic import make_pretrained

transformers = pytest.importorskip("transformers")
KINDS = ("mlm", "input", "output", "task")
TEXTS = ["amber birch fern daisy", "cedar"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Source, Path]]:
    """Return a model of each kind and the folder that it is exported to."""
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        model = {"num_layers": 2, "init_std": 0.1, **(OUTPUT if kind == "output" else {})}
        run = make_pretrained(folder / "run", objective="mlm" if kind == "mlm" else "exlm", model=model)
        if kind == "task":
            (folder / "tuned").mkdir()
            source = finetuned_source(load_finetuned(words_run(folder / "tuned", run, "colour", (1,)), device="cpu"))
        else:
            source = pretrained_source(load_pretrained(run, device="cpu"))
        (folder / "out").mkdir()
        write_model(source, folder / "out")
        made[kind] = source, folder / "out"
    return made


@pytest.fixture(params=KINDS)
def exported(request: pytest.FixtureRequest, folders: dict[str, tuple[Source, Path]]) -> tuple[Any, Any, Source]:
    """Return a model, its tokenizer and where they come from."""
    source, folder = folders[request.param]
    options = {} if source.has_head else {"add_pooling_layer": False}
    model = getattr(transformers, source.class_name).from_pretrained(folder, **options).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder), source


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


def batch_of(tokenizer: Any) -> Any:
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


def test_the_classes_are_those_of_transformers_and_no_code_travels(exported, folders):
    model, _, source = exported
    assert type(model).__module__ == "transformers.models.esm.modeling_esm"
    assert type(model).__name__ == source.class_name
    for _, folder in folders.values():
        assert not list(folder.rglob("*.py"))
        assert "auto_map" not in (folder / "config.json").read_text(encoding="utf-8")


def test_hidden_states_attentions_and_tuples_are_returned_on_request(exported):
    model, tokenizer, source = exported
    batch = batch_of(tokenizer)
    with torch.no_grad():
        plain = model(**batch)
        full = model(**batch, output_hidden_states=True)
        as_tuple = model(**batch, return_dict=False)
    assert plain.hidden_states is None
    assert plain.attentions is None
    assert len(full.hidden_states) == source.recipe.model.num_layers + 1
    assert torch.equal(as_tuple[0], plain[0])
    with torch.no_grad():
        states = model.base_model(**batch).last_hidden_state
    assert torch.equal(full.hidden_states[-1], states)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    assert len(attentions) == source.recipe.model.num_layers
    rows = attentions[0].sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_labels_give_the_loss(exported):
    model, tokenizer, source = exported
    batch = batch_of(tokenizer)
    if not source.has_head:
        return  # an encoder has no loss
    if source.results is None:
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        logits = model(**batch).logits.flatten(0, 1)
    else:
        labels = torch.tensor([2, 0])
        logits = model(**batch).logits
    wanted = torch.nn.functional.cross_entropy(logits, labels.flatten())
    torch.testing.assert_close(model(**batch, labels=labels).loss, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_options_are_refused(folders, kind):
    source, folder = folders[kind]
    with pytest.raises(TypeError, match="no_such_option"):
        getattr(transformers, source.class_name).from_pretrained(folder, no_such_option=1)


def test_gradient_checkpointing_gives_the_same_gradients(exported):
    model, tokenizer, _ = exported
    batch = batch_of(tokenizer)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**batch)[0].square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for part in model.modules():  # checkpointing runs in training mode; dropout would draw anew
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    for part in model.modules():
        if hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.0
    model.train()
    plain = gradients()
    # the name before transformers 5.23 or so
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    for ours, theirs in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_transformers_saves_again_gives_the_same_outputs(folders, kind, tmp_path):
    """The frequencies of `rope: 2d` too, which the config does not tell."""
    source, folder = folders[kind]
    options = {} if source.has_head else {"add_pooling_layer": False}
    outputs = []
    for path in (folder, tmp_path / "again"):
        model = getattr(transformers, source.class_name).from_pretrained(path, **options).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        with torch.no_grad():
            outputs.append(model(**batch_of(tokenizer))[0])
        model.save_pretrained(tmp_path / "again")
        tokenizer.save_pretrained(tmp_path / "again")
    assert torch.equal(*outputs)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.filterwarnings("default")  # torch's own
@pytest.mark.slow
def test_a_compiled_model_gives_the_same_outputs(folders, kind):
    source, folder = folders[kind]
    options = {} if source.has_head else {"add_pooling_layer": False}
    model = getattr(transformers, source.class_name).from_pretrained(folder, **options).eval()
    batch = batch_of(transformers.AutoTokenizer.from_pretrained(folder))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model)(**batch)[0], model(**batch)[0])


@pytest.mark.parametrize("kind", ["mlm", "output"])
def test_a_pipeline_fills_masks_by_path_without_warnings(folders, kind, caplog):
    source, folder = folders[kind]
    with logged(caplog) as warned:
        fill = transformers.pipeline("fill-mask", model=str(folder), device="cpu")
        found = fill("amber [MASK] fern", top_k=source.tokenizer.vocab_size)
    assert warned == []
    ids = source.encode("amber [MASK] fern")
    ours = source.outputs(ids)[ids.index(source.tokenizer.mask_id)].softmax(-1)
    theirs = {word["token"]: word["score"] for word in found}
    np.testing.assert_allclose([theirs[token] for token in range(len(ours))], ours.numpy(), atol=1e-6)


def test_a_pipeline_refuses_to_fill_masks_of_an_input_model(folders):
    _, folder = folders["input"]
    with pytest.raises(Exception, match=r"(?i)mask"):
        transformers.pipeline("fill-mask", model=str(folder), device="cpu")("amber [MASK] fern")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_extracts_features_by_path(folders, kind, caplog):
    """What `AutoModel` reports of any such folder: the head, which it does not load, and the pooler, which it adds."""
    source, folder = folders[kind]
    with logged(caplog) as warned:
        extract = transformers.pipeline("feature-extraction", model=str(folder), device="cpu")
        (found,) = extract("amber birch")
    report = "\n".join(warned)
    reported = {
        word for word in report.replace("'", " ").replace(",", " ").split() if word.endswith((".weight", ".bias"))
    }
    assert {word.split(".")[0] for word in reported} <= {"pooler", "lm_head", "classifier"}
    hidden = source.model.encoder(torch.tensor([source.encode("amber birch")]))[0]
    np.testing.assert_allclose(found, hidden.detach().numpy(), atol=1e-5)


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
