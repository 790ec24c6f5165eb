"""Folders of transformers as runs: what is read of them, what is refused, and that nothing is left behind."""

import json
import struct
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from exlm_cli.errors import CheckpointError, ExlmError, TokenizerError
from exlm_cli.export.intake import take_in
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrained import load_pretrained
from tests.foreign import save_masked_lm

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def hf_models(tmp_path, monkeypatch):
    """The folder in the cache in which models are kept."""
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hf-models"


@pytest.fixture
def folder(tmp_path):
    save_masked_lm("bert", tmp_path / "their-BERT")
    return tmp_path / "their-BERT"


def take(folder, kind="text"):
    return take_in(f"hf:{folder}", SilentProgress(), kind)


def test_a_folder_is_taken_in_once_and_read_without_it(folder, hf_models):
    """The copy is a whole run: it is read after the folder is gone. A changed file gives another one."""
    run = take(folder)
    assert take(folder) == run
    of_smiles = take(folder, "smiles")
    _edit(folder, "config.json", hidden_dropout_prob=0.0)
    changed = take(folder)
    assert {*hf_models.iterdir()} == {run, of_smiles, changed}
    for path in folder.iterdir():
        path.unlink()
    assert load_pretrained(of_smiles, device="cpu").recipe.data.kind == "smiles"
    found = load_pretrained(run, device="cpu")
    assert (found.step, found.recipe.objective, found.recipe.name) == (0, "mlm", "their-bert")
    assert (found.recipe.model.dropout, found.recipe.data.sequence_length) == (0.1, 66)
    assert load_pretrained(run / "checkpoints" / "step-0", device="cpu").sha256 == found.sha256


def test_weights_in_parts_and_in_half_precision_are_read(folder):
    """Parts that an index names give the model of one file; 16-bit weights are read as the numbers that they hold."""
    whole = load_pretrained(take(folder), device="cpu").model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for part, own in parts.items():
        save_file({name: tensors[name].half() for name in own}, folder / part)
    index = {"weight_map": {name: part for part, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    halved = load_pretrained(take(folder), device="cpu").model.state_dict()
    assert all(torch.equal(whole[name].half().float(), tensor) for name, tensor in halved.items())


def test_names_of_the_oldest_files_are_known(folder):
    """`gamma` and `beta` of the first BERT are weight and bias; its decoder's bias may have two names."""
    expected = load_pretrained(take(folder), device="cpu").model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    renamed["cls.predictions.decoder.bias"] = renamed.pop("cls.predictions.bias")
    save_file(renamed | {"bert.pooler.dense.weight": torch.zeros(2)}, folder / "model.safetensors")
    found = load_pretrained(take(folder), device="cpu").model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())


def test_special_tokens_come_from_the_maps(folder):
    """A map may give a token as text or as an object; without maps the family's own names hold."""
    names = {"mask_token": {"content": "dog", "lstrip": True}, "unk_token": "cat"}
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = load_pretrained(take(folder), device="cpu").tokenizer
    assert tokenizer.special_tokens == ("[PAD]", "[CLS]", "[SEP]", "dog", "cat")
    assert tokenizer.encode_with_masks("the dog") == tokenizer.encode_with_masks("the [MASK]")


def _edit(folder, name, **changes):
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **changes}))


def _tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


WORD = "bert.embeddings.word_embeddings.weight"
HOSTILE = {
    "no config": (lambda f: (f / "config.json").unlink(), "it has no config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
    "config is deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is "),
    "config has a long number": (
        lambda f: (f / "config.json").write_text(f'{{"a": 1{"0" * 5000}}}'), "config.json is not JSON",
    ),
    "config is long": (lambda f: (f / "config.json").write_text("{" + " " * (1 << 21) + "}"), "has over 1,048"),
    "another family": (lambda f: _edit(f, "config.json", model_type="xlnet"), "family `xlnet`; exlm knows bert"),
    "untied": (lambda f: _edit(f, "config.json", tie_word_embeddings=False), "not tied to its token embedding"),
    "a size is a word": (lambda f: _edit(f, "config.json", hidden_size="wide"), "config"),
    "a size is huge": (lambda f: _edit(f, "config.json", vocab_size=1 << 40), "numbers are at most 1048576"),
    "layers without end": (lambda f: _edit(f, "config.json", num_hidden_layers=10**6), "less than or equal to 200"),
    "wider than its weights": (
        lambda f: _edit(f, "config.json", hidden_size=16_384), r"word_embeddings.weight` has the shape \(26, 32\)",
    ),
    "a tensor is missing": (lambda f: _tensors(f, lambda t: t.pop(WORD)), f"`{WORD}` is missing"),
    "a tensor is cut": (
        lambda f: _tensors(f, lambda t: t.update({WORD: t[WORD][:5].clone()})), rf"`{WORD}` has the shape \(5, 32\)",
    ),
    "a tensor is not finite": (lambda f: _tensors(f, lambda t: t[WORD].fill_(torch.nan)), "not finite"),
    "half a head": (
        lambda f: _tensors(f, lambda t: t.pop("cls.predictions.transform.dense.bias")),
        "`cls.predictions.transform.dense.bias` is missing",
    ),
    "an encoder without a layer": (
        lambda f: _tensors(f, lambda t: [t.pop(name) for name in list(t) if name.startswith(("cls.", "bert.encoder"))]),
        "`bert.encoder.layer.0.attention.self.query.weight` is missing",
    ),
    "a pickle alone": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "it has no model.safetensors; .* pickle",
    ),
    "a pickle under another name": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04\x95" * 9), "not a whole safetensors file",
    ),
    "weights are cut": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "not a whole",
    ),
    "a header without end": (
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "not a whole safetensors",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "it has no tokenizer.json"),
    "a tokenizer is broken": (lambda f: (f / "tokenizer.json").write_text("{}"), "not a tokenizer"),
    "a tokenizer of more ids": (
        lambda f: _edit(f, "config.json", vocab_size=20), "the encoder embeds 20 tokens|has the shape",
    ),
    "another mask": (lambda f: _edit(f, "tokenizer_config.json", mask_token="<none>"), "special tokens <none> are not"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_or_damaged_folder_gives_one_line(folder, hf_models, case):
    """The error names the folder and what is wrong; no copy is left, and a repaired folder is taken."""
    damage, reason = HOSTILE[case]
    damage(folder)
    with pytest.raises(ExlmError, match=reason) as caught:
        take(folder)
    assert isinstance(caught.value, CheckpointError | TokenizerError)
    assert "\n" not in caught.value.message
    assert "their-BERT" in caught.value.message
    assert not any(hf_models.iterdir() if hf_models.exists() else ())


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "", "..", "no"])
def test_an_index_names_files_of_its_folder_alone(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {WORD: name}}))
    with pytest.raises(CheckpointError, match=r"which is no safetensors file in its folder"):
        take(folder)


def test_a_name_of_the_hub_is_downloaded_without_pickles_or_code_and_no_other_name_is(folder, monkeypatch):
    for name in ("../up/and/away", "a b", "?"):
        with pytest.raises(CheckpointError, match=r"no such folder, and no name of the Hub"):
            take_in(f"hf:{name}", SilentProgress())
    download = Mock(side_effect=[OSError("no route to host"), str(folder)])
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"the Hub gives no such model: no route to host"):
        take_in("hf:OWNER/NAME@main", SilentProgress())
    run = take_in("hf:Owner/Their.BERT@v1", SilentProgress())
    assert (download.call_args.args, download.call_args.kwargs["revision"]) == (("Owner/Their.BERT",), "v1")
    patterns = download.call_args.kwargs["allow_patterns"]
    assert all(pattern.endswith((".json", ".safetensors", ".txt")) for pattern in patterns)
    assert run.name.startswith("owner-their.bert-v1-")


def test_ids_that_the_encoder_looks_for_are_its_tokenizers(tmp_path):
    """RoBERTa counts positions from its padding, and ESM-2 scales by the masks: both must be the tokenizer's."""
    save_masked_lm("roberta", tmp_path / "roberta")
    _edit(tmp_path / "roberta", "config.json", pad_token_id=3)
    with pytest.raises(CheckpointError, match=r"`pad_token_id` is 3 in config\.json, and 1 in its tokenizer"):
        take(tmp_path / "roberta")
    save_masked_lm("esm", tmp_path / "esm")
    _edit(tmp_path / "esm", "config.json", mask_token_id=5)
    with pytest.raises(CheckpointError, match=r"`mask_token_id` is 5 in config\.json, and 32 in its tokenizer"):
        take(tmp_path / "esm")


def test_a_list_of_tokens_without_letters_is_no_proteins(tmp_path):
    save_masked_lm("esm", tmp_path / "esm")
    (tmp_path / "esm" / "vocab.txt").write_text("<cls>\n<pad>\n<eos>\n<unk>\n<mask>")
    with pytest.raises(TokenizerError, match=r"vocab\.txt has no letters"):
        take(tmp_path / "esm")
