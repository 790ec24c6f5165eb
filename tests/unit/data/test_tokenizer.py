"""The tokenizer: offsets, masks in sentences, words and files by hand; BPE is lossless."""

import json
import re
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exlm_cli.data.smiles import train_smiles_vocabulary
from exlm_cli.data.tokenizer import MIN_BPE_VOCABULARY, SPECIAL_TOKENS, Tokenizer, train_bpe
from exlm_cli.errors import TokenizerError
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder

SENTENCE = "This is great, and I'm very glad to see this."
BPE = train_bpe([SENTENCE] * 10, 400, 2, SilentProgress())
SMILES = train_smiles_vocabulary(["CC(=O)Oc1ccccc1C(=O)O", "C[N+](C)(C)Cl"], 1000, 1, SilentProgress())


def _with_model(model: dict[str, Any], tokens: tuple[str, ...] = SPECIAL_TOKENS) -> str:
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = [{"id": i, "content": t, **flags} for i, t in enumerate(tokens)]
    return json.dumps({"version": "1.0", "added_tokens": added, "model": model})


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example(f" very  glad\n{SENTENCE}größer \N{GRINNING FACE} e\N{COMBINING ACUTE ACCENT}.")
@settings(max_examples=100)
def test_any_text_comes_back_from_its_tokens_and_from_their_offsets(text):
    encoding = BPE.encode_with_offsets(text)
    assert encoding.ids == BPE.encode(text)
    assert BPE.decode(encoding.ids) == text
    assert BPE.special_ids.isdisjoint(encoding.ids)
    ends = [0, *(end for _, end in dict.fromkeys(encoding.offsets))]
    assert [start for start, _ in dict.fromkeys(encoding.offsets)] == ends[:-1]
    assert ends[-1] == len(text)


def test_a_mask_in_a_sentence_replaces_the_word_and_the_blank_before_it_and_in_smiles_no_blank(tmp_path):
    masked = BPE.encode_with_masks("This is [MASK], and I'm very [MASK] to see this.")
    filled = iter([*BPE.encode(" great"), *BPE.encode(" glad")])
    assert [next(filled) if i == BPE.mask_id else i for i in masked] == BPE.encode(SENTENCE)
    ids = SMILES.encode_with_masks("C[MASK](=O)[MASK]")
    assert [SMILES.token_text(i) for i in ids] == ["C", "[MASK]", "(", "=", "O", ")", "[MASK]"]
    # a BPE may have been trained on SMILES: the recipe says what it reads
    BPE.save(tmp_path / "tokenizer.json")
    of_smiles = Tokenizer.load(tmp_path / "tokenizer.json", "smiles")
    assert of_smiles.encode_with_masks("I [MASK]") == [*BPE.encode("I "), BPE.mask_id]


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" very", "very"), ("T", "T"), (" ", "\N{OPEN BOX}"), ("\n", "\\n"), ("\t", "\\t"), ("ö", "<Ã>")],
)
def test_a_token_is_shown_readably(text, shown):
    assert BPE.token_text(BPE.encode(text)[0]) == shown


def test_a_word_begins_with_a_blank_or_a_mark_and_every_token_of_smiles_does():
    text = "very (great)\nday, is it\tn't\u00e9"
    ids = BPE.encode(text)
    words = [""]
    for i, (start, end) in zip(ids, BPE.encode_with_offsets(text).offsets, strict=True):
        words[-1:] = [words[-1], text[start:end]] if BPE.begins_word[i] else [words[-1] + text[start:end]]
    # bytes of one character each cover all of it
    assert words == ["very", " ", "(great", ")", "\nday", ",", " is", " it", "\tn", "'t\u00e9\u00e9"]
    assert SMILES.begins_word.all()


def test_pieces_of_wordpiece_continue_a_word_and_a_vocabulary_without_marks_has_no_words():
    pieces = {"type": "WordPiece", "vocab": {"un": 5, "##able": 6}, "unk_token": "[UNK]"} | {
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 99,
    }  # fmt: skip
    letters = {"type": "BPE", "vocab": {"A": 5, "C": 6}, "merges": []}
    for model, begins in ((pieces, [True, False]), (letters, [True, True])):
        model["vocab"] = {token: i for i, token in enumerate(SPECIAL_TOKENS)} | model["vocab"]
        backend = tokenizers.Tokenizer.from_str(_with_model(model))
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
        assert Tokenizer(backend, "text").begins_word.tolist() == [True] * 5 + begins


def test_a_saved_tokenizer_loads_with_the_same_ids_and_fingerprint(tmp_path):
    """Truncation and padding of a foreign one are switched off and no part of it."""
    backend = tokenizers.Tokenizer.from_str(BPE.to_json())
    backend.enable_truncation(2)
    backend.enable_padding(length=200)
    for tokenizer, same, text in ((SMILES, SMILES, "CC(=O)O"), (Tokenizer(backend, "text"), BPE, SENTENCE)):
        tokenizer.save(tmp_path / "tokenizer.json")
        loaded = Tokenizer.load(tmp_path / "tokenizer.json", same.kind)
        assert loaded.encode(text) == tokenizer.encode(text) == same.encode(text)
        assert loaded.fingerprint == tokenizer.fingerprint == same.fingerprint


def _vocabulary(added: tuple[str, ...] = SPECIAL_TOKENS, *, highest: int = 5, **model: Any) -> bytes:
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS)} | {"C": highest}
    return _with_model({"type": "WordLevel", "unk_token": "[UNK]", "vocab": vocab} | model, added).encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not a tokenizer: "),
        (b'{"version": ' + b"[" * 9000, "not a tokenizer: "),
        (_vocabulary((), vocab={"[PAD]": 0, "[CLS]": 1}), r"special tokens \[SEP\] \[MASK\] \[UNK\]"),
        (_vocabulary(highest=2**31), "the highest id is 2147483648, of 6 tokens"),
        (_vocabulary(type="BPE", merges=[], dropout=0.5), r"`dropout` is 0\.5: "),
    ],
)
def test_a_file_that_is_no_fitting_tokenizer_is_refused(tmp_path, content, reason):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"^{re.escape(str(path))}: .*{reason}"):
        Tokenizer.load(path, "smiles")


FOREIGN = ("<pad>", "<s>", "</s>", "<mask>", "<unk>")
MASKED = (
    "It was a [MASK] day.", "[MASK] was here", "un[MASK]able", "a [MASK] [MASK] b", "a [MASK][MASK], b",
    "the end [MASK]", "two  [MASK]\n[MASK]\tx", "[MASK]", " [MASK]",
)  # fmt: skip


def foreign_backend(pre_tokenizer: Any, **mask_flags: bool) -> tokenizers.Tokenizer:
    """Return a byte-level BPE with the special tokens of a RoBERTa, whose mask has flags of its own."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizer
    added = [tokenizers.AddedToken(t, special=True, normalized=False) for t in FOREIGN if t != "<mask>"]
    added.insert(3, tokenizers.AddedToken("<mask>", special=True, **mask_flags))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=added, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([SENTENCE, "It was a day here, unable to end."] * 5, trainer)
    backend.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    return backend


@pytest.mark.parametrize(
    ("pre_tokenizer", "mask_flags"),
    [
        (tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), {}),
        (tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), {"lstrip": True}),
        (tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True), {"normalized": True}),
        (tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first"), {}),
        (tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always"), {"lstrip": True, "rstrip": True}),
    ],
)
def test_a_foreign_tokenizer_reads_masks_as_it_does_in_transformers(pre_tokenizer, mask_flags):
    transformers = pytest.importorskip("transformers")
    backend = foreign_backend(pre_tokenizer, **mask_flags)
    definition = backend.to_str()
    ours = Tokenizer(backend, "text", special_tokens=FOREIGN)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(definition), mask_token="<mask>"
    )
    for text in MASKED:
        own = text.replace("[MASK]", "<mask>")
        expected = theirs(own, add_special_tokens=False)["input_ids"]
        assert ours.encode_with_masks(text) == ours.encode_with_masks(own) == expected
        assert expected.count(ours.mask_id) == text.count("[MASK]")


def test_no_special_token_of_a_foreign_tokenizer_but_its_mask_is_read_in_a_text():
    backend = foreign_backend(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    ours = Tokenizer(backend, "text", special_tokens=FOREIGN)
    ids = ours.encode_with_masks("a </s> [MASK] <s>")
    assert ours.special_ids.intersection(ids) == {ours.mask_id}
    assert ids == [*ours.encode("a </s> "), ours.mask_id, *ours.encode(" <s>")]
    assert ours.mask_id not in ours.encode("a <mask>")


def test_rare_pairs_are_not_merged():
    progress = Recorder()
    tokenizer = train_bpe(["abcdefgh"], 1000, 2, progress)
    assert tokenizer.vocab_size == MIN_BPE_VOCABULARY == 261
    assert progress.said == ["trained a byte-level BPE of 261 tokens"]


def test_an_id_that_a_vocabulary_with_gaps_lacks_is_shown_by_its_number_and_never_masked():
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS)} | {"C": 5, "O": 8}
    gapped = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")), "smiles")
    assert [gapped.token_text(i) for i in range(5, gapped.vocab_size)] == ["C", "<6>", "<7>", "O"]
    assert gapped.is_ordinary.nonzero()[0].tolist() == [5, 8]
    assert gapped.decode([5, 6, 8]).split() == ["C", "O"]
