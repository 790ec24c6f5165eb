"""Masks: the rule for one sequence at a time in plain Python, their laws, what is spared; the hashes of chance.

The laws are App. C of the paper: a token with k copies is corrupted with probability p^k, variance p^k (1 - p^k) / N;
1/m for m masks of a range; and renewal theory for spans, whose lengths are scipy's Poisson.
The first outputs of SplitMix64 for the seed 1234567 are those that the reference implementation prints (Vigna,
splitmix64.c; listed at rosettacode.org, "Pseudo-random numbers/Splitmix64"). Chance is tested with fixed seeds and a
bound of five standard errors.
"""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tokenizers
from scipy.stats import poisson
from tokenizers import models, pre_tokenizers, processors

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data import BoolArray
from exlm_cli.data.masking import Masker, hash_words, uniform
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, Tokenizer, train_bpe
from exlm_cli.progress import SilentProgress
from tests.plain_hash import plain_hash, splitmix64
from tests.tiny import SPECIAL, sequences

TOKENS = np.arange(5, 40)
SEED, EPOCH = 7, 3
COUNT, PLACE, REPLACE, TOKEN = range(4)
RANGE, KIND, TURN, LENGTH, SPAN = range(6, 11)
WORDS = [f"word{number} and some others, in sentence {number * 7}: don't mask them." for number in range(40)]
BPE = train_bpe(WORDS[:3], 300, 2, SilentProgress())


def _masked(rows: Any, **masking: Any) -> BoolArray:
    """Return which places of rows are masked, without those of [CLS] and [SEP]."""
    masker = Masker(MaskingConfig.model_validate(masking), SPECIAL, SEED, EPOCH)
    return masker.mask(sequences(rows)).is_masked[:, 1:-1]


def _random_rows(count: int) -> list[np.ndarray]:
    """Rows of one to forty tokens, special ones among them; the first has no others."""
    rng = np.random.default_rng(0)
    return [np.array([2, 4, 0]), *(rng.integers(0, 40, size=length) for length in rng.integers(1, 40, size=count - 1))]


def _plain_uniform(*words: int) -> float:
    return (plain_hash(*words) >> 11) / 2**53


def _plain_round(expected: float, index: int) -> int:
    """Round up or down at random, so that the mean is kept."""
    return max(1, math.floor(expected + _plain_uniform(SEED, EPOCH, COUNT, index)))


def _plain_number(num_maskable: int, index: int, masking: MaskingConfig) -> int:
    """Number of masks of one sequence of at least one maskable token."""
    if not isinstance(masking.mask_ratio, tuple):
        return _plain_round(masking.mask_ratio * num_maskable, index)
    fewest, most = _bounds(masking.mask_ratio, num_maskable)
    sums = list(itertools.accumulate((1 / m for m in range(1, most + 1)), initial=0.0))
    point = sums[fewest - 1] + _plain_uniform(SEED, EPOCH, RANGE, index) * (sums[most] - sums[fewest - 1])
    return next(m for m in range(fewest, most + 1) if sums[m] > point)


def _bounds(ratio: Sequence[float], num_maskable: int) -> tuple[int, int]:
    low, high = (Fraction(str(share)) * num_maskable for share in ratio)
    fewest = max(1, math.ceil(low))
    return fewest, max(fewest, math.floor(high))


def _plain_spans(tokens: list[int], index: int, number: int, masking: MaskingConfig, tokenizer: Tokenizer) -> list[int]:
    """Masked places of one sequence, [CLS] counted, span by span on the ring of its tokens."""
    begins = [place == 0 or bool(tokenizer.begins_word[token]) for place, token in enumerate(tokens)]
    turn = plain_hash(SEED, EPOCH, TURN, index) % len(tokens)
    while not begins[turn]:
        turn -= 1
    ends, draw = [0], itertools.count()
    while ends[-1] < len(tokens):
        uniform_draw = _plain_uniform(SEED, EPOCH, LENGTH, index, next(draw))
        ends.append(ends[-1] + 1 + int(poisson.ppf(uniform_draw, masking.span_mean - 1)))
    spans: dict[int, list[int]] = {}
    for step in range(len(tokens)):
        place = (turn + step) % len(tokens)
        if begins[place]:
            span = sum(end <= step for end in ends[1:])
        spans.setdefault(span, []).append(place)
    order = sorted(spans, key=lambda span: plain_hash(SEED, EPOCH, SPAN, index, span))
    chosen = [place + 1 for span in order for place in spans[span] if tokenizer.is_ordinary[tokens[place]]]
    return chosen[:number]


def _plain_mask(
    tokens: list[int], index: int, masking: MaskingConfig, tokenizer: Tokenizer, at: float | None
) -> tuple[list[int], list[int]]:
    """Input and masked positions of one sequence, by the rule of the design, a token at a time."""
    original = [tokenizer.cls_id, *(t for t in tokens for _ in range(masking.num_repeats)), tokenizer.sep_id]
    candidates = [i for i, token in enumerate(original) if token not in tokenizer.special_ids]
    by_hash = sorted(candidates, key=lambda i: plain_hash(SEED, EPOCH, PLACE, index, i))
    in_spans = masking.place == "spans"
    if masking.place == "mixed":
        in_spans = _plain_uniform(SEED, EPOCH, KIND, index) < 0.5
    if at is not None:
        number = at if at >= 1 else _plain_round(at * len(candidates), index)
        positions = by_hash[: int(number)]
    elif masking.scheme == "bernoulli":
        positions = [i for i in candidates if _plain_uniform(SEED, EPOCH, PLACE, index, i) < masking.mask_ratio]
        positions = positions or by_hash[:1]
    elif candidates and in_spans:
        positions = _plain_spans(tokens, index, _plain_number(len(candidates), index, masking), masking, tokenizer)
    else:
        positions = by_hash[: _plain_number(len(candidates), index, masking)] if candidates else []
    ordinary = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids)
    shown = list(original)
    for i in positions:
        draw = _plain_uniform(SEED, EPOCH, REPLACE, index, i)
        if draw >= masking.keep_ratio + masking.random_ratio:
            shown[i] = tokenizer.mask_id
        elif draw >= masking.keep_ratio:
            shown[i] = ordinary[plain_hash(SEED, EPOCH, TOKEN, index, i) % len(ordinary)]
    return shown, sorted(positions)


@pytest.mark.parametrize(
    ("masking", "at"),
    [
        ({}, None),
        ({"mask_ratio": 0.02}, None),
        ({"scheme": "bernoulli", "mask_ratio": 0.04}, None),
        ({"scheme": "bernoulli", "mask_ratio": 0.622, "num_repeats": 4}, None),
        ({"num_repeats": 2}, None),
        ({"mask_ratio": 0.5, "keep_ratio": 0.2, "random_ratio": 0.3}, None),
        ({"mask_ratio": [0, 0.6]}, None),
        ({"mask_ratio": [0.2, 0.29], "num_repeats": 2}, None),
        ({"mask_ratio": 0.3, "place": "spans"}, None),
        ({"mask_ratio": 0.3, "place": "mixed", "span_mean": 1.0}, None),
        ({"mask_ratio": [0.05, 0.9], "place": "spans", "span_mean": 6.5}, None),
        ({"mask_ratio": [0, 0.6], "place": "spans"}, 1),
        ({"mask_ratio": [0, 0.6], "place": "mixed"}, 5),
        ({"scheme": "bernoulli"}, 0.3),
    ],
)
@pytest.mark.parametrize("tokenizer", [SPECIAL, BPE], ids=["ids", "text"])
def test_a_batch_is_masked_as_each_sequence_is_in_plain_python(masking, at, tokenizer):
    """`at` is a number or a ratio in place of the law of `masking`."""
    config = MaskingConfig.model_validate(masking)
    rows = _random_rows(60) if tokenizer is SPECIAL else list(map(np.array, BPE.encode_batch(WORDS)))
    indices = [5 * i for i in range(len(rows))]
    masker, given = Masker(config, tokenizer, SEED, EPOCH, at), sequences(rows, indices)
    masked = masker.mask(given)
    targets = iter(zip(masked.target_ids.tolist(), masked.target_source.tolist(), strict=True))
    for b, (row, index) in enumerate(zip(rows, indices, strict=True)):
        shown, positions = _plain_mask(row.tolist(), index, config, tokenizer, at)
        length = len(shown)
        assert masked.lengths[b] == length
        assert masked.input_ids[b].tolist() == shown + [SPECIAL.pad_id] * (masked.input_ids.shape[1] - length)
        assert np.flatnonzero(masked.is_masked[b]).tolist() == positions
        own = list(itertools.islice(targets, len(positions)))
        assert own == [(int(row[(i - 1) // config.num_repeats]), (i - 1) // config.num_repeats + 1) for i in positions]
    assert next(targets, None) is None
    assert masker.count(given).tolist() == masked.is_masked.sum(1).tolist()


@pytest.mark.parametrize(("num_repeats", "ratio"), [(1, 0.15), (2, 0.387), (4, 0.622), (8, 0.789)])
def test_corrupted_share_and_its_variance_follow_app_c(num_repeats, ratio):
    num_samples, num_tokens = 1500, len(TOKENS)
    rows = np.tile(TOKENS, (num_samples, 1))
    masked = _masked(rows, mask_ratio=ratio, scheme="bernoulli", num_repeats=num_repeats)
    copies = masked.reshape(num_samples, num_tokens, num_repeats)
    shares = copies.all(-1).mean(1)
    law = ratio**num_repeats
    variance = law * (1 - law) / num_tokens
    assert abs(shares.mean() - law) < 5 * math.sqrt(variance / num_samples)
    # standard error of a sample variance, from the fourth central moment measured here
    fourth = np.mean((shares - shares.mean()) ** 4)
    assert abs(shares.var(ddof=1) - variance) < 5 * math.sqrt((fourth - variance**2) / num_samples)


@pytest.mark.parametrize("ratio", [(0.0, 0.6), (0.29, 0.3)])
def test_a_number_from_a_range_has_the_probability_of_its_law(ratio):
    """1/m over the sum of 1/m, for all whole numbers from ceil(low * 35), at least 1, to floor(high * 35)."""
    num_rows = 40_000
    masker = Masker(MaskingConfig(mask_ratio=ratio), SPECIAL, SEED, EPOCH)
    counts = masker.count(sequences(np.tile(TOKENS, (num_rows, 1))))
    fewest, most = _bounds(ratio, len(TOKENS))
    found = np.bincount(counts, minlength=most + 1)
    assert (found[fewest:] > 0).all()
    assert found[fewest:].sum() == num_rows == found.sum()
    law = 1 / np.arange(fewest, most + 1)
    law /= law.sum()
    assert (np.abs(found[fewest:] / num_rows - law) < 5 * np.sqrt(law * (1 - law) / num_rows) + 1e-12).all()


@pytest.mark.parametrize("span_mean", [3.0, 5.5])
def test_tokens_at_a_distance_are_masked_together_as_spans_of_that_law_make_them(span_mean):
    """Two tokens d apart are in one span with probability sum of (l - d) p(l) over l > d, divided by the mean l.

    With a share f of all spans masked that gives f for those and f^2 for the others, up to terms of 1 / n.
    """
    n, num_rows, ratio = 4000, 400, 0.2
    is_masked = _masked(np.full((num_rows, n), 7), mask_ratio=ratio, place="spans", span_mean=span_mean)
    lengths = np.arange(1, 60)
    law = poisson.pmf(lengths - 1, span_mean - 1)
    for distance in range(1, 8):
        in_one = (np.maximum(lengths - distance, 0) * law).sum() / span_mean
        together = (is_masked[:, :-distance] & is_masked[:, distance:]).mean(1)
        expected = ratio * in_one + ratio**2 * (1 - in_one)
        assert abs(together.mean() - expected) < 5 * together.std() / math.sqrt(num_rows) + 2 / n, distance


def test_random_tokens_are_those_of_texts():
    """BERT, RoBERTa and ESM-2 name unused places of their vocabularies; a text has no special tokens either."""
    tokens = [*SPECIAL_TOKENS, "[unused0]", "[unused12]", "madeupword0001", "<null_1>", "<|end|>", "cat", "sits", "##s"]
    backend = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    backend.add_special_tokens(["<|end|>"])
    foreign = Tokenizer(backend, "text")
    masking = MaskingConfig(mask_ratio=0.9, random_ratio=0.99)
    masked = Masker(masking, foreign, SEED, EPOCH).mask(sequences([[10, 11, 12]] * 200))
    shown = set(masked.input_ids[masked.is_masked].tolist())
    assert shown - {foreign.mask_id} == {10, 11, 12}


def test_the_plain_generator_is_splitmix64():
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert [splitmix64(1234567, number) for number in range(5)] == published


@pytest.mark.parametrize("words", [(0,), (7, 3), (2**63 - 1, 2**32 - 1, 0, 5, 9)])
def test_hashes_are_those_of_the_plain_generator(words):
    assert hash_words(*words).tolist() == [plain_hash(*words)]
    assert uniform(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist() == [0.0, 1 - 2.0**-53]
