"""Exported folders in transformers against the run: its own forward pass over batches as pre-training makes them."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from exlm_cli.api.run import load
from exlm_cli.dag.build import build_dag
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.errors import CheckpointError, ConfigError, ExlmError
from exlm_cli.export import convert, folder
from exlm_cli.export.folder import (
    Comparison,
    check_before_export,
    compare,
    compare_outputs,
    export_folder,
    write_model,
)
from exlm_cli.export.onnx_model import run_onnx
from exlm_cli.export.source import finetuned_source, pretrained_source
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.rows import task as rows_task
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import CHAIN
from tests.unit.finetune.finetuned_runs import (
    finetune,
    glue_run,
    squad_run,
    words_run,
    write_rows,
)
from tests.unit.finetune.synthetic import make_pretrained

transformers = pytest.importorskip("transformers")

# weights so large that a wrong position, head or frequency changes every output; still larger ones let rounding grow
# beyond the tolerance on some processors
LARGE = {"init_std": 0.2}
TOLERANCE = 1e-5


def loaded(source, out):
    """Return the model of a folder as transformers loads it; no weight of its own may be missing or left over."""
    options = {} if source.has_head else {"add_pooling_layer": False}
    model, report = getattr(transformers, source.class_name).from_pretrained(out, output_loading_info=True, **options)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def our_outputs(pretrained, token_ids):
    """Return (L, V) logits of one state a token, or (L, D) states without an LM head, as pre-training computes them."""
    model = pretrained.model
    with torch.inference_mode():
        states = model.encoder(torch.tensor([token_ids]))[0]
        if pretrained.recipe.expands_input:
            return states
        return F.linear(model.lm_head(states), model.decoder_weight, model.lm_head.bias)


KINDS = {
    "mlm": {"objective": "mlm", "model": {"rope": "1d", "rope_base": 500.0}},
    "input": {"model": {"rope": "2d"}},
    "chain": {"model": CHAIN},
}


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """Return a pre-trained model of each kind, and the folder that it is exported to."""
    sections, place = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    run = make_pretrained(place / "run", **sections | {"model": {**LARGE, "num_layers": 2, **sections["model"]}})
    pretrained = load_pretrained(run, device="cpu")
    source = pretrained_source(pretrained)
    (place / "out").mkdir()
    write_model(source, place / "out")
    return pretrained, source, place / "out"


def test_text_models_give_the_same_outputs_also_when_transformers_saves_them_again(made, tmp_path):
    """Those with an LM head also with [MASK]s; a padded batch, so that padding is not attended to either. The folder
    has no code, and the frequencies of `rope: 2d`, which the config does not tell, are kept.
    """
    pretrained, source, out = made
    assert not list(out.rglob("*.py"))
    assert "auto_map" not in (out / "config.json").read_text(encoding="utf-8")
    mask = " [MASK]" if source.fills_masks else " fern"
    texts = [f"amber birch{mask} daisy", f"cedar{mask}"]
    for path in (out, tmp_path / "again"):
        exported, tokenizer = loaded(source, path), transformers.AutoTokenizer.from_pretrained(path)
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            theirs = exported(**batch)[0]
        for row, text in enumerate(texts):
            ids = source.encode(text)
            assert batch["input_ids"][row].tolist()[: len(ids)] == ids
            ours = our_outputs(pretrained, ids)
            assert float(ours.abs().max()) > 1
            assert float((theirs[row, : len(ids)] - ours).abs().max()) <= TOLERANCE
        exported.save_pretrained(tmp_path / "again")
        tokenizer.save_pretrained(tmp_path / "again")
    assert source.class_name == ("EsmForMaskedLM" if source.fills_masks else "EsmModel")
    assert source.fills_masks != pretrained.recipe.expands_input
    assert source.fills_masks == (tokenizer.mask_token is not None)


def test_sentence_transformers_gives_the_vectors_of_embed(made):
    assert_vectors_of_embed(*made[1:])


def test_sentence_transformers_gives_the_vectors_of_a_fine_tuned_model(text_model, tmp_path):
    (tmp_path / "out").mkdir()
    source = finetuned_source(load_finetuned(words_run(tmp_path, text_model, "colour", (1,)), device="cpu"))
    write_model(source, tmp_path / "out")
    assert_vectors_of_embed(source, tmp_path / "out")


def assert_vectors_of_embed(source, out):
    """Compare in a batch of several lengths, with a text that is too long."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["amber birch fern daisy", "cedar", "elder " * 100]
    encoder = sentence_transformers.SentenceTransformer(str(out), device="cpu")
    assert encoder.max_seq_length == source.sequence_length
    ours = load(source.run, device="cpu").embed(texts).mean
    assert float(np.abs(ours).max()) > 0.1
    np.testing.assert_allclose(encoder.encode(texts), ours, atol=TOLERANCE)


@pytest.mark.parametrize("made", ["chain"], indirect=True)
def test_a_chain_fills_a_single_mask_as_the_dag_does_in_a_pipeline_without_warnings(made, caplog):
    """What `inspect-dag` computes from the k states; Python's warnings are errors."""
    pretrained, source, out = made
    dag = build_dag(pretrained, "amber [MASK] daisy")
    of_states = dag.log_trans[0, 1:-1, None] + dag.node_log_probs[1:-1]
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        fill = transformers.pipeline("fill-mask", model=str(out), device="cpu")
        found = fill("amber [MASK] daisy", top_k=source.tokenizer.vocab_size)
    finally:
        library.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line for line in said if not line.startswith("Device set to use")] == []  # of version 4 on every pipeline
    theirs = {word["token"]: word["score"] for word in found}
    expected = np.exp(np.logaddexp.reduce(of_states, axis=0))
    np.testing.assert_allclose([theirs[token] for token in range(len(expected))], expected, atol=TOLERANCE)


def test_a_pair_that_is_too_long_is_compared(tmp_path, monkeypatch):
    """A run that cut its pairs otherwise than the exported tokenizer does would be refused."""
    run = glue_run(tmp_path, make_pretrained(tmp_path / "pretrained"), "rte")
    source = finetuned_source(load_finetuned(run, device="cpu"))
    (tmp_path / "out").mkdir()
    write_model(source, tmp_path / "out")
    assert compare_outputs(source, tmp_path / "out").num_sequences == 4
    assert len(source.encode(*source.texts()[1])) == source.sequence_length
    monkeypatch.setattr(rows_task, "longest_first", lambda lengths, budget: [budget - budget // 2, budget // 2])
    with pytest.raises(ExlmError, match="the exported tokenizer splits `It was a quiet day"):
        compare_outputs(source, tmp_path / "out")


@pytest.mark.parametrize("kind", ["colour", "length", "labels", "span"])
def test_task_models_give_the_same_outputs(tmp_path, kind):
    """Classes, a value in its units, several 0/1 labels, and the ends of answers."""
    pretrained = make_pretrained(tmp_path / "pretrained", model=LARGE)
    if kind == "span":
        run = squad_run(tmp_path, pretrained)
    elif kind == "labels":
        rows = [[word, str(i % 2), str(i // 2 % 2)] for i, word in enumerate(["amber", "fern", "cedar"] * 12)]
        table = write_rows(tmp_path / "rows.csv", ["text", "a", "b"], rows)
        task = {"name": "csv", "files": {"train": str(table)}, "text_column": "text", "label_columns": ["a", "b"]}
        run = finetune(tmp_path, pretrained, **task)
    else:
        run = words_run(tmp_path, pretrained, kind)
    finetuned = load_finetuned(run, device="cpu")
    source = finetuned_source(finetuned)
    (tmp_path / "out").mkdir()
    write_model(source, tmp_path / "out")
    exported = loaded(source, tmp_path / "out")
    runner = finetuned.runners[finetuned.results.best_seed]
    for text in ("amber birch", "daisy fern amber"):
        ids = torch.tensor([source.encode(text)])
        with torch.no_grad():
            theirs = exported(ids).logits[0].double()
            ours = runner.model.in_units(runner.model(ids, torch.tensor([ids.shape[1]])))[0].double()
        assert float((theirs - ours).abs().max()) <= TOLERANCE
    problem_type = {"colour": "single_label_classification", "length": "regression", "span": None}
    assert exported.config.problem_type == problem_type.get(kind, "multi_label_classification")
    assert list(exported.config.id2label.values()) == list(finetuned.results.output_names)


def test_an_onnx_model_gives_the_same_outputs(tmp_path):
    """In batches and lengths that were not traced. `test_card` has spans, `test_family` a value and another encoder."""
    pytest.importorskip("onnxruntime")
    run = make_pretrained(tmp_path / "pretrained", model={**LARGE, **CHAIN})
    source = pretrained_source(load_pretrained(run, device="cpu"))
    done = export_folder(source, tmp_path / "out", SilentProgress(), form="onnx", licence="mit")
    assert [path.name for path in done.files] == [
        "README.md", "config.json", "model.onnx", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    rows = [source.encode(text) for text in ("amber", "daisy fern amber", "birch birch birch cedar")]
    logits = run_onnx(tmp_path / "out", rows, source.tokenizer.pad_id)
    assert compare(source, list(zip(rows, logits, strict=True))).num_sequences == 3
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "library_name: onnx\nlicense: mit\n" in card
    assert "onnxruntime.InferenceSession" in card


def test_outputs_that_differ_leave_nothing(tmp_path, monkeypatch):
    """Weights that are not the run's are loaded without complaint; only the comparison finds them."""
    source = pretrained_source(load_pretrained(make_pretrained(tmp_path / "run", model=LARGE), device="cpu"))

    def write_another(source, out):
        written = write_model(source, out)
        tensors = load_file(out / "model.safetensors")
        save_file({name: 1.5 * tensor for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})
        return written

    monkeypatch.setattr(folder, "write_model", write_another)
    with pytest.raises(ExlmError, match="outputs differ by") as refused:
        export_folder(source, tmp_path / "made" / "out", SilentProgress())
    assert refused.value.exit_code == 1
    assert not (tmp_path / "made").exists()


def test_outputs_that_are_no_numbers_are_refused_and_rounding_as_large_as_the_run_s_own_is_not():
    """Every comparison with NaN is false, so one must ask what is right. Where outputs almost cancel, the float32 error
    of the run itself is far above 1e-5 of them: an export as far off in the other direction is as good.
    """
    right, own = torch.ones(2, 3, dtype=torch.float64), 1e-3
    source = SimpleNamespace(outputs=lambda ids, exact=False: right if exact else right + own)
    for theirs in (right * torch.nan, right - 10 * own):
        with pytest.raises(ExlmError, match="outputs differ by"):
            compare(source, [([5, 6], right), ([5, 6], theirs), ([5, 6], right)])
    assert compare(source, [([5, 6], right - own)]).difference == pytest.approx(own)


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_blanks_and_line_ends_before_a_mask_are_tokens_as_in_a_run(normalizer):
    """With a normalizer of a user's own, blanks beside the one of the masked word are lost."""
    tokenizer = train_bpe(["a day of sun.\n\nThe next day\twas colder."] * 3, 300, 2, SilentProgress())
    given = json.loads(tokenizer.to_json()) | {"normalizer": normalizer}
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(given)), "text")
    files = convert.tokenizer_files(tokenizer, max_length=64, has_mask=True, has_segments=False)
    exported = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    texts = ["It was a [MASK] day.", "[MASK]", "[MASK][MASK]. [MASK]"]
    if normalizer is None:
        texts += ["first line.\n\n[MASK]  [MASK]\t[MASK]", "a\u00a0[MASK]", "[MASK ] [mask]"]
    for text in texts:
        own = [tokenizer.cls_id, *tokenizer.encode_with_masks(text), tokenizer.sep_id]
        assert exported.encode(text).ids == own


def test_a_link_to_an_empty_folder_is_filled_and_a_place_that_cannot_be_replaced_refused(tmp_path, monkeypatch):
    """A link that is replaced itself, and a mount point that cannot be, would end a long export with an error."""
    source = pretrained_source(load_pretrained(make_pretrained(tmp_path / "run"), device="cpu"))
    monkeypatch.setattr(folder, "compare_outputs", lambda *_: Comparison(1, 0.0, 1.0))
    (tmp_path / "real").mkdir()
    (tmp_path / "empty").mkdir()
    out = tmp_path / "link"
    out.symlink_to("real")
    assert export_folder(source, out, SilentProgress()).files[0] == out / "1_Pooling/config.json"
    assert (tmp_path / "real" / "README.md").is_file()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"^\.: the current directory, which cannot be replaced$"):
        check_before_export(Path())
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    with pytest.raises(CheckpointError, match="a mount point") as refused:
        check_before_export(tmp_path / "new")
    assert f"`--out {tmp_path}/new/model`" in refused.value.hint


def test_encoders_that_esm_lacks_are_refused(tmp_path):
    for named, sections in (
        ("`masking.num_repeats: 2`", {"masking": {"num_repeats": 2}, "objective": "mlm"}),
        ("`model.learned_positions: true`", {"model": {"learned_positions": True}}),
    ):
        source = pretrained_source(load_pretrained(make_pretrained(tmp_path / named, **sections), device="cpu"))
        with pytest.raises(ConfigError, match=named):
            export_folder(source, tmp_path / "out", SilentProgress())
        assert not (tmp_path / "out").exists()


def test_a_missing_package_is_refused_with_the_extra_that_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="transformers is not installed") as refused:
        check_before_export(tmp_path / "out")
    assert '".[hf]"' in refused.value.hint
    with pytest.raises(ConfigError, match="onnx is not installed") as refused:
        check_before_export(tmp_path / "out", "onnx")
    assert '".[onnx]"' in refused.value.hint
