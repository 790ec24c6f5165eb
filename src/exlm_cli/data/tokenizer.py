"""Tokenizer for text and for SMILES, by the `tokenizers` library: loading, encoding, decoding, training for text."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from exlm_cli.data import BoolArray
from exlm_cli.data.rows.records import RowKind
from exlm_cli.errors import TokenizerError
from exlm_cli.files import reason_of, write_atomically
from exlm_cli.format import printable
from exlm_cli.progress import Progress
from exlm_cli.run_dir import damage_hint

PAD, CLS, SEP, MASK, UNK = "[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"
SPECIAL_TOKENS = (PAD, CLS, SEP, MASK, UNK)
"""Every tokenizer that this package trains has these at ids 0 to 4; others are named by their recipe."""

MIN_BPE_VOCABULARY = 256 + len(SPECIAL_TOKENS)
"""The 256 bytes and the special tokens."""

TOKENIZER_FILE = "tokenizer.json"
"""The tokenizer of a run, in its directory."""

PIECE_PREFIX = "##"
"""Begins the pieces of a SMILES token after its first one; no text has it."""

_MODELS: dict[RowKind, tuple[str, ...]] = {"text": ("BPE",), "smiles": ("WordPiece", "WordLevel", "BPE")}
_LONGEST_TRAINED_WORD = 1024
"""Bytes of a word that a BPE is trained on; the rest of a longer one is another word."""
_UNUSED = re.compile(r"\[unused\d+\]|madeupword\d+|<null_\d+>")
"""Names that BERT, RoBERTa and ESM-2 give to unused places of their vocabularies."""
_SPACE = " "
_BLANKS = "\u0120\u010a\u010d\u0109\u2581"
"""What a byte-level BPE writes for space, line feed, carriage return and tab, and SentencePiece for a space."""
_BRACKETS_OR_STAR, _OPEN_PLACE = re.compile(r"\[[^\]]*]|\*"), re.compile(r"\A(?:\*|\[\*(?::\d+)?])\Z")
_TRAIN_HINT = "train one with `exlm tokenize`"


@final
class Tokenizer:
    """A byte-level BPE (text), an atom-wise SMILES vocabulary, or another model's, with the five special tokens.

    Attributes:
        kind: What it reads, as the recipe says.
        special_tokens: What padding, start, end, mask and unknown are called.
        vocab_size: Highest id plus 1, special tokens included.
        pair_ids: Tokens between the two texts of a pair: one [SEP], or what the file's post-processor puts there.
        is_foreign: Whether it frames a text itself or has other special tokens, as those of transformers: then it also
            says whether the blanks around a mask belong to it.
        fingerprint: sha256 of the canonical JSON, in hex.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        kind: RowKind,
        origin: str = "tokenizer",
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`, which errors call `origin`.

        Raises:
            TokenizerError: Its model is one that exlm does not read, draws tokens at random, lacks a special token, has
                too large an id, frames a text in another way than [CLS] text [SEP], or does not work.
        """
        # "[SEP]" in raw text must stay text, and no text may be truncated.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        with _explaining(origin):
            vocabulary = backend.get_vocab(with_added_tokens=True)
        if max(vocabulary.values(), default=0) > 2 * len(vocabulary):  # the library would count up to it for minutes
            raise TokenizerError(
                f"{origin}: the highest id is {max(vocabulary.values())}, of {len(vocabulary)} tokens", _TRAIN_HINT
            )
        with _explaining(origin):
            definition = json.loads(backend.to_str())
        model = definition["model"]["type"]
        # a tokenizer of transformers, which has a post-processor, reads text with any of them
        taken = _MODELS["smiles" if definition["post_processor"] else kind]
        if model not in taken:
            raise TokenizerError(
                f"{origin}: a tokenizer with the model `{model}`, but `data.kind` is {kind}, which takes "
                f"{' or '.join(taken)}",
                _TRAIN_HINT,
            )
        if definition["model"].get("dropout"):
            raise TokenizerError(
                f"{origin}: `dropout` is {definition['model']['dropout']}: a text has other tokens every time",
                "set `dropout` to null in the file",
            )
        missing = [token for token in special_tokens if token not in vocabulary]
        if missing:
            raise TokenizerError(
                f"{origin}: special tokens {' '.join(missing)} are not in the vocabulary",
                f"name those of the file with `tokenizer.special_tokens`, or {_TRAIN_HINT}",
            )
        self._backend, self._origin = backend, origin
        with _explaining(origin):
            # some damage shows only in use
            backend.decode(backend.encode("[MASK] CO", add_special_tokens=False).ids)
        self.kind: RowKind = kind
        self.special_tokens = tuple(special_tokens)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.pad_id, self.cls_id, self.sep_id, self.mask_id, self.unk_id = (vocabulary[t] for t in special_tokens)
        self.special_ids = frozenset(vocabulary[token] for token in special_tokens)
        self._hidden_ids = frozenset((self.pad_id, self.cls_id, self.sep_id))
        self.is_foreign = bool(definition["post_processor"]) or self.special_tokens != SPECIAL_TOKENS
        with _explaining(origin):
            self.pair_ids, self.has_segments = self._framing()
        described = definition if self.special_tokens == SPECIAL_TOKENS else [definition, self.special_tokens]
        self.fingerprint = hashlib.sha256(
            json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()

    def _framing(self) -> tuple[tuple[int, ...], bool]:
        """Return the tokens between the texts of a pair, and whether the second text has segment 1.

        Both are what the post-processor does to a pair; without one that adds tokens, a pair is [CLS] a [SEP] b [SEP].
        """
        pair = self._backend.encode("0", "0", add_special_tokens=True)
        of_text = [index for index, sequence in enumerate(pair.sequence_ids) if sequence is not None]
        second = [index for index, sequence in enumerate(pair.sequence_ids) if sequence == 1]
        if len(of_text) == len(pair.ids) or not second:
            return (self.sep_id,), False
        first_end = max(index for index in of_text if index < second[0])
        between, start, end = pair.ids[first_end + 1 : second[0]], pair.ids[: of_text[0]], pair.ids[of_text[-1] + 1 :]
        if (start, end) != ([self.cls_id], [self.sep_id]) or not between or set(between) != {self.sep_id}:
            raise TokenizerError(
                f"{self._origin}: a pair becomes {' '.join(pair.tokens)}, not [CLS] text [SEP] text [SEP]", _TRAIN_HINT
            )
        return tuple(between), pair.type_ids[second[0]] == 1

    @cached_property
    def is_ordinary(self) -> BoolArray:
        """(V,) True at tokens that may be masked, or shown in place of a masked one.

        Those that no text has are not: special ones, unused places of a vocabulary, and ids that it lacks.
        """
        is_ordinary = np.zeros(self.vocab_size, dtype=bool)
        for token, index in self._backend.get_vocab().items():
            is_ordinary[index] = not _UNUSED.fullmatch(token)
        added = self._backend.get_added_tokens_decoder()
        is_ordinary[[*self.special_ids, *(index for index, token in added.items() if token.special)]] = False
        return is_ordinary

    @cached_property
    def begins_word(self) -> BoolArray:
        """(V,) True at tokens that begin a word of running text; at all of a SMILES, or of a vocabulary without words.

        Of a byte-level BPE these are tokens that begin with a blank, a line break or another character of ASCII that is
        neither letter nor digit; of WordPiece all without its prefix. Other tokens continue the word before them.
        """
        begins = np.ones(self.vocab_size, dtype=bool)
        model = json.loads(self._backend.to_str())["model"]
        ordinary = {token: i for token, i in self._backend.get_vocab().items() if token and self.is_ordinary[i]}
        if self.kind == "text" and model["type"] == "WordPiece":
            prefix = model["continuing_subword_prefix"]
            begins[[index for token, index in ordinary.items() if token.startswith(prefix)]] = False
        elif self.kind == "text" and any(token[0] in _BLANKS for token in ordinary):
            continues = (
                index
                for token, index in ordinary.items()
                if token[0] not in _BLANKS and (token[0].isalnum() or not token[0].isascii())
            )
            begins[list(continues)] = False
        return begins

    @classmethod
    def load(cls, path: Path, kind: RowKind, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Self:
        """Read a `tokenizer.json` for rows of a kind; `special_tokens` as `tokenizer.special_tokens` of a recipe.

        Raises:
            TokenizerError: It cannot be read, is not a tokenizer, or is one that exlm cannot use.
        """
        return cls(read_backend(path), kind, str(path), special_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be made anew in a worker process: the library forgets that special tokens in a text are text."""
        return Tokenizer, (self._backend, self.kind, self._origin, self.special_tokens)

    def to_json(self) -> str:
        """Return the definition in the format of the `tokenizers` library."""
        return json.dumps(json.loads(self._backend.to_str()), ensure_ascii=False, indent=1)

    def save(self, path: Path) -> None:
        """Write the definition, atomically.

        Raises:
            CheckpointError: A file cannot be written.
        """
        write_atomically(path, self.to_json().encode())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; no special tokens are added, and "[MASK]" in it is plain text."""
        with _explaining(self._origin):
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, on all cores."""
        with _explaining(self._origin):
            return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tokenizers.Encoding:
        """Return the `ids` of a text and its `offsets`: the characters [start, end) of the text that each one covers.

        A token of running text covers the blank before its word. Tokens that share the bytes of one character all cover
        that character.
        """
        with _explaining(self._origin):
            return self._backend.encode(text, add_special_tokens=False)

    def encode_with_masks(self, text: str) -> list[int]:
        """Return the ids of a text in which each literal "[MASK]", or the tokenizer's own word, is the mask token.

        In running text the blank before a "[MASK]" is part of the masked word, as in " word", but in that of a foreign
        tokenizer whose mask leaves it.
        """
        if self.is_foreign:
            with _explaining(self._origin):
                found: list[int] = self._with_masks.encode(
                    text.replace(MASK, self.special_tokens[3]), add_special_tokens=False
                ).ids
            return found
        first, *rest = re.split(rf"{' ?' if self.kind == 'text' else ''}{re.escape(MASK)}", text)
        ids = self.encode(first)
        for piece in rest:
            ids += [self.mask_id, *self.encode(piece)]
        return ids

    @cached_property
    def _with_masks(self) -> tokenizers.Tokenizer:
        """The tokenizer when it finds its mask in a text, and of its special tokens no other."""
        definition, mask = json.loads(self._backend.to_str()), self.special_tokens[3]
        flags = [token for token in definition["added_tokens"] if token["content"] == mask]
        for token in flags:
            token["special"] = False
        with _explaining(self._origin):
            backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
            backend.encode_special_tokens = True
            if not flags:
                backend.add_tokens([AddedToken(mask, normalized=False)])
        return backend

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without [PAD], [CLS] and [SEP], but with [MASK] and [UNK]."""
        with _explaining(self._origin):
            text: str = self._backend.decode([i for i in ids if i not in self._hidden_ids], skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        """Return one token for display: without the blank in front, unprintable characters escaped; `<7>` for a gap."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return f"<{token_id}>"
        if token in self.special_tokens:
            return str(token)
        if self.kind == "smiles":
            return str(token).removeprefix(PIECE_PREFIX)
        with _explaining(self._origin):
            text = self._backend.decode([token_id], skip_special_tokens=False)
        if "\N{REPLACEMENT CHARACTER}" in text:
            return f"<{token}>"
        shown = text.removeprefix(_SPACE) if text.strip() else text
        return printable(shown).replace(_SPACE, "\N{OPEN BOX}")


def mark_masks(text: str, kind: RowKind) -> str:
    """Return a text with "[MASK]" for each "<mask>" and, in SMILES, for each open place, `*` or `[*:1]`."""
    text = text.replace("<mask>", MASK)
    return text if kind == "text" else _BRACKETS_OR_STAR.sub(lambda found: _OPEN_PLACE.sub(MASK, found[0]), text)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`.

    Raises:
        TokenizerError: It cannot be read or is not a tokenizer.
    """
    hint = damage_hint(path) or _TRAIN_HINT
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"{path}: the tokenizer file cannot be read: {reason_of(error)}", hint) from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: the tokenizer file is not UTF-8 text", hint) from error
    try:
        # `from_str` would raise a bare `Exception`
        with _explaining(str(path)):
            backend = tokenizers.Tokenizer.from_buffer(text.encode())
    except ValueError as error:
        raise TokenizerError(f"{path}: not a tokenizer: {error}", hint) from error
    return backend


def train_bpe(rows: Iterable[str], vocab_size: int, min_frequency: int, progress: Progress) -> Tokenizer:
    """Train a GPT-2-style byte-level BPE: every byte has a token; the blank before a word belongs to the word.

    `rows` are read once and never held. `vocab_size` counts the five special tokens; a text with fewer pairs of
    `min_frequency` occurrences gives fewer tokens.

    Raises:
        TokenizerError: `vocab_size` does not hold all bytes and the special tokens.
    """
    if vocab_size < MIN_BPE_VOCABULARY:
        raise TokenizerError(
            f"`tokenizer.vocab_size` {vocab_size} is too small for byte-level BPE: 256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens need at least {MIN_BPE_VOCABULARY}",
            f"give `--set tokenizer.vocab_size={MIN_BPE_VOCABULARY}` or more",
        )
    backend = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # a merge moves the rest of its word in memory: a line without blanks, like one of DNA, takes hours as one word
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(_LONGEST_TRAINED_WORD)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        # `lstrip` makes other programs treat [MASK] as `Tokenizer.encode_with_masks` does
        special_tokens=[AddedToken(t, special=True, normalized=False, lstrip=t == MASK) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(rows, trainer)
    backend.pre_tokenizer = words
    tokenizer = Tokenizer(backend, "text")
    progress.message(f"trained a byte-level BPE of {tokenizer.vocab_size:,} tokens")
    return tokenizer


@contextmanager
def _explaining(origin: str) -> Iterator[None]:
    """Turn a failure inside the `tokenizers` library into an error that names the tokenizer."""
    try:
        yield
    except BaseException as error:  # a panic is not an `Exception`
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{origin}: the tokenizer does not work: {error}", _TRAIN_HINT) from error
