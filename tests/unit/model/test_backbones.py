"""Encoders of transformers: the numbers are those of transformers' own classes, from which the weights come."""

import copy
import json

import numpy as np
import pytest
import torch

from exlm_cli import load
from exlm_cli.config.finetune import FinetuneModelConfig
from exlm_cli.config.sections import BackboneConfig, ModelConfig
from exlm_cli.data.batch import expand
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.export.intake import esm_tokenizer, take_in
from exlm_cli.model import compiled
from exlm_cli.model.backbones import FAMILIES, ForeignEncoder, model_values, plain_config
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import TaskModel
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.rows.task import encode_texts
from exlm_cli.train.objective import Objective
from exlm_cli.train.pretrained import begin_with, load_pretrained
from tests.foreign import AMINO_ACIDS, ESM_TOKENS, config_of, save_masked_lm, tokenizer_of
from tests.recorder import Recorder
from tests.tiny import masked_by_hand

transformers = pytest.importorskip("transformers")

IN_VERSION_5 = pytest.mark.skipif(transformers.__version__ < "5", reason="version 4 reads the config otherwise")


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """A model of each family: transformers' own, and the same one read as a run."""
    folder = tmp_path_factory.mktemp("families")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXLM_CACHE_DIR", str(folder / "cache"))
        found = {}
        for family in FAMILIES:
            theirs = save_masked_lm(family, folder / family)
            run = take_in(f"hf:{folder / family}", SilentProgress())
            found[family] = theirs, load_pretrained(run, device="cpu")
    return found


def masked_sequences(tokenizer, lengths, num_masks):
    """Return random sequences with as many masks each, and the labels of transformers' loss."""
    rng = np.random.default_rng(0)
    ordinary = np.flatnonzero(tokenizer.is_ordinary)
    labels = torch.full((len(lengths), max(lengths)), -100)
    rows, targets = [], []
    for row, length in enumerate(lengths):
        ids = np.array([tokenizer.cls_id, *rng.choice(ordinary, length - 2), tokenizer.sep_id])
        places = np.sort(1 + rng.permutation(length - 2)[:num_masks])
        targets.extend(ids[places])
        labels[row, places] = torch.from_numpy(ids[places])
        ids[places] = tokenizer.mask_id
        rows.append(ids)
    return masked_by_hand(rows, targets, tokenizer.mask_id), labels


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(12, 12, 12), (14, 9, 21)])
def test_the_loss_is_that_of_the_family(taken, family, lengths):
    """An MLM, and a chain that fills each mask alone, have the cross-entropy of transformers' own logits; every row has
    as many masks, so the mean over rows is that over masks.
    """
    theirs, ours = taken[family]
    tokenizer, recipe = ours.tokenizer, ours.recipe
    masked, labels = masked_sequences(tokenizer, lengths, 4)
    batch = expand(masked, 1, expands_input=False, pad_id=tokenizer.pad_id)
    attention_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        expected = theirs(input_ids=batch.token_ids, attention_mask=attention_mask, labels=labels).loss
        objective = Objective(tokenizer.unk_id, 1, "reference")
        as_mlm = objective.sequence_nll(ours.model, batch)
        chain = ExlmModel(
            recipe.changed({"objective": "exlm", "model.alignment": "chain"}), tokenizer.vocab_size
        ).eval()
        assert begin_with(chain, ours) == "the chain head"
        alone = objective.mask_nll(chain, chain.node_states(batch), batch)
    assert as_mlm.mean() == pytest.approx(expected.item(), abs=1e-5)
    assert alone.mean() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_without_a_head_has_the_states_of_transformers(family, tmp_path, monkeypatch):
    """Saved on its own, as sentence encoders are: no prefix, with a pooler where the family has one. Mean vectors of
    texts are the means of all states of transformers, as sentence-transformers takes them; a message says each time
    that the LM head is new.
    """
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "cache"))
    save_masked_lm(family, tmp_path / "encoder")
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{FAMILIES[family].classes}Model")(
        transformers.AutoConfig.from_pretrained(tmp_path / "encoder")
    ).eval()
    theirs.save_pretrained(tmp_path / "encoder")
    told = Recorder()
    runs = [take_in(f"hf:{tmp_path / 'encoder'}", told) for _ in range(2)]
    assert sum("it has no LM head, so a new one" in line for line in told.said) == 2
    texts = ["M K", "L L A V"] if family == "esm" else ["the dog", "a cat sees the man"]
    run = load(runs[0], device="cpu")
    found = run.embed(texts).mean
    for text, vector in zip(texts, found, strict=True):
        (ids,) = encode_texts([(text,)], run.tokenizer, 32).token_ids
        with torch.no_grad():
            states = theirs(input_ids=torch.tensor(ids)[None]).last_hidden_state[0]
        np.testing.assert_allclose(vector, states.mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "esm"])
def test_pairs_are_read_as_by_transformers(taken, family, tmp_path):
    """Tokens and segments of a pair are those of transformers' tokenizer, and so are the states of a task's model."""
    theirs, ours = taken[family]
    tokenizer_of(family).save(str(tmp_path / "t.json"))
    pair = ("M K", "L L A") if family == "esm" else ("the dog", "a cat sees")
    (own_ids,) = encode_texts([pair], ours.tokenizer, 32).token_ids
    if family == "esm":
        (tmp_path / "vocab.txt").write_text("\n".join(ESM_TOKENS))
        expected = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))(*pair, return_tensors="pt")
    else:
        fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "t.json"))
        expected = fast(*pair, return_tensors="pt", return_token_type_ids=family == "bert")
    assert own_ids.tolist() == expected["input_ids"][0].tolist()
    model = TaskModel(ours.recipe, FinetuneModelConfig(), ours.tokenizer.vocab_size, 1)
    model.load_encoder(ours.model)
    ids, lengths = torch.from_numpy(own_ids)[None], torch.tensor([len(own_ids)])
    with torch.no_grad():
        states = getattr(theirs, FAMILIES[family].encoder)(**expected).last_hidden_state
        torch.testing.assert_close(model.eval().encode(ids, lengths, is_padded=False), states, rtol=0, atol=1e-6)
    assert (ours.recipe.model.backbone.segment_separator is not None) == (family == "bert")


def test_proteins_are_tokenised_as_by_transformers(tmp_path):
    """Random strings of amino acids, unknown letters and blanks have the ids of transformers' `EsmTokenizer`."""
    (tmp_path / "vocab.txt").write_text("\n".join(ESM_TOKENS))
    theirs = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    special_tokens = FAMILIES["esm"].special_tokens
    ours = Tokenizer(esm_tokenizer(ESM_TOKENS, special_tokens), "text", special_tokens=special_tokens)
    rng = np.random.default_rng(0)
    alphabet = list(AMINO_ACIDS) * 3 + [*"Jjm# \t"]
    texts = ["", "MKTAYIAKQR", "M<mask>K"[:1], *("".join(rng.choice(alphabet, 30)) for _ in range(200))]
    assert [ours.encode(text) for text in texts] == [
        theirs(text, add_special_tokens=False)["input_ids"] for text in texts
    ]
    assert ours.encode_with_masks("M<mask>K[MASK]") == theirs("M<mask>K<mask>", add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode("MKT")) == "MKT"


@IN_VERSION_5
def test_frequencies_of_an_esm_are_those_that_were_saved(tmp_path, monkeypatch):
    """Published files hold some in 16 bits: the states are transformers' with these, also in another dtype."""
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "cache"))
    theirs = save_masked_lm("esm", tmp_path / "esm")
    frequencies = theirs.esm.rotary_embeddings.inv_freq
    frequencies.copy_(frequencies.half() * 1.5)
    theirs.save_pretrained(tmp_path / "esm")
    ours = load_pretrained(take_in(f"hf:{tmp_path / 'esm'}", SilentProgress()), device="cpu").model.encoder
    ids = torch.randint(4, 30, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs.esm(ids).last_hidden_state, rtol=0, atol=1e-6)
        exact = copy.deepcopy(ours).double()(ids)
        torch.testing.assert_close(exact.float(), ours(ids), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("default")  # the compiler warns of what it does to torch
@pytest.mark.parametrize(("family", "num_graphs"), [("bert", 3), ("modernbert", 8)])
def test_compiled_blocks_give_the_same_states_and_gradients(taken, family, num_graphs, monkeypatch, caplog):
    """With padding, without, and of one sequence; graphs without generated code, of all sizes."""
    # not above: every worker of a test run reads this file, and the tools of the compiler take seconds
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled, "compile_graph", counter)
    eager = copy.deepcopy(taken[family][1].model.encoder).eval()
    graphs = copy.deepcopy(eager)
    graphs.compile_blocks()
    batches = []
    for lengths in ((9, 9), (5, 9, 3), (9,), (11, 11, 4), (8, 8, 8)):
        ids = torch.randint(5, 20, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
        is_token = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batches.append((ids, None if is_token.all() else is_token))
        results = []
        for model in (graphs, eager):
            model.zero_grad()
            states = model(*batches[-1])[is_token]
            states.square().sum().backward()
            results.append([states, *(p.grad for p in model.parameters() if p.grad is not None)])
        torch.testing.assert_close(*results)
    assert counter.frame_count == num_graphs
    if family == "bert":  # for one of them: it takes seconds
        with torch.no_grad():
            for batch in batches:
                graphs(*batch)
        assert counter.frame_count == 2 * num_graphs
    assert not [record for record in caplog.records if record.name == "exlm_cli"]


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_recomputing_blocks_changes_no_gradient(taken, family):
    model = copy.deepcopy(taken[family][1].model.encoder).train()
    ids = torch.randint(5, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    gradients = []
    for gradient_checkpointing in (False, True):
        model.gradient_checkpointing = gradient_checkpointing
        model.zero_grad()
        torch.manual_seed(0)
        model(ids, query_positions=torch.tensor([[0, 3], [1, 8]])).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert model.gradient_checkpointing


def test_a_tokenizer_with_more_tokens_than_the_encoder_is_refused(taken):
    with pytest.raises(CheckpointError, match="ids up to 99, and the encoder embeds"):
        ForeignEncoder(taken["bert"][1].recipe.model, 100)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {"hidden_size": "wide"}),
        ("roberta", {"hidden_act": "launch"}),
        pytest.param("modernbert", {"layer_types": ["sliding_attention"]}, marks=IN_VERSION_5),
    ],
)
def test_a_config_that_is_no_encoders_gives_one_line(family, changes):
    config = config_of(family, 30).to_dict() | changes

    def build():
        backbone = BackboneConfig(family=family, config=json.dumps(plain_config(family, config)))
        ForeignEncoder(ModelConfig(backbone=backbone, **model_values(backbone)), 20)

    with pytest.raises(CheckpointError, match=rf"^the config of the {family} encoder is not accepted: .") as caught:
        build()
    assert "\n" not in caught.value.message


def test_no_code_or_path_of_a_config_is_kept():
    """A plain config holds the family's own keys alone, whatever else its file names."""
    hostile = {
        "auto_map": {"AutoModel": "evil.Model"},
        "_attn_implementation": "evil/kernel",
        "attn_implementation": "evil/kernel",
        "quantization_config": {"quant_method": "evil"},
        "_name_or_path": "/etc/passwd",
        "is_decoder": True,
        "is_folding_model": True,
    }
    for family in FAMILIES:
        config = config_of(family, 30).to_dict()
        assert plain_config(family, config | hostile) == plain_config(family, config)
        assert hostile.keys().isdisjoint(plain_config(family, config | hostile))


def test_padding_rows_of_the_table_are_never_predicted(tmp_path, monkeypatch):
    """An encoder may embed more ids than its tokenizer has: these get no probability, and probabilities sum to 1."""
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "cache"))
    save_masked_lm("bert", tmp_path / "bert", vocab_size=64)
    ours = load_pretrained(take_in(f"hf:{tmp_path / 'bert'}", SilentProgress()), device="cpu")
    masked, _ = masked_sequences(ours.tokenizer, (8,), 2)
    batch = expand(masked, 1, expands_input=False, pad_id=ours.tokenizer.pad_id)
    with torch.no_grad():
        log_probs = ours.model.node_log_probs(ours.model.node_states(batch))
    assert log_probs.shape[-1] == ours.tokenizer.vocab_size < len(ours.model.encoder.token_embedding.weight)
    assert log_probs[0, 1].exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_dropout_of_the_recipe_is_the_encoders(taken):
    recipe = taken["modernbert"][1].recipe
    values = {"model.dropout": 0.5, "model.activation_dropout": 0.25, "model.attention_dropout": 0.125}
    config = ForeignEncoder(recipe.changed(values).model, 20).base.config
    assert (config.embedding_dropout, config.mlp_dropout, config.attention_dropout) == (0.5, 0.25, 0.125)
    with pytest.raises(ConfigError, match=r"`model\.activation_dropout` is 0\.25, and the encoder of a bert has no"):
        ForeignEncoder(taken["bert"][1].recipe.changed({"model.activation_dropout": 0.25}).model, 20)
