"""The grammar's joint distribution against sampling and against sums written out by hand."""

import math
import re
from collections import Counter

import pytest

from benchmarks.grammar_joint import (
    Joint,
    choices_of,
    independence_bound_nats,
    joint_entropy_nats,
    marginals,
    split_pieces,
    true_joint,
)
from exlm_cli.data.bundled.grammar import sample_sentences, templates
from exlm_cli.data.tokenizer import train_bpe
from exlm_cli.progress import SilentProgress

FEELING = "This is [MASK], and I'm very [MASK] to see this."
GOOD = {"amazing", "wonderful", "beautiful", "lovely", "great", "perfect"}
BAD = {"terrible", "awful", "horrible", "cruel", "ugly", "bad"}


def test_the_sentiment_sentence_has_the_joint_of_its_two_scenes():
    joint = true_joint(FEELING)
    # three in five are good news; in each scene 6 adjectives x 6 emotions, "surprised" in both
    expected = {(a, e): 0.6 / 36 for a in GOOD for e in ("glad", "happy", "pleased", "delighted", "proud", "surprised")}
    expected |= {(a, e): 0.4 / 36 for a in BAD for e in ("sorry", "sad", "upset", "angry", "unhappy", "surprised")}
    assert joint == pytest.approx(expected, abs=1e-12)


def mutual_information_nats(joint: Joint) -> float:
    """What the masked words tell about each other (total correlation): what an MLM must lose."""
    return len(next(iter(joint))) * (independence_bound_nats(joint) - joint_entropy_nats(joint))


def test_the_other_word_settles_the_sentiment():
    assert set(true_joint("This is [MASK], and I'm very sorry to see this.")) == {(a,) for a in BAD}
    assert set(true_joint("This is [MASK], and I'm very glad to see this.")) == {(a,) for a in GOOD}
    torn = true_joint("This is [MASK], and I'm very surprised to see this.")
    assert torn[("great",)] == pytest.approx(0.6 / 6)
    assert torn[("awful",)] == pytest.approx(0.4 / 6)


def test_a_cue_settles_the_sentiment():
    joint = true_joint("They lost the game: this is [MASK], and I'm very [MASK] to see this.")
    assert {adjective for adjective, _ in joint} == BAD
    assert mutual_information_nats(joint) == pytest.approx(0, abs=1e-12)


def test_numbers_agree():
    joint = true_joint("[MASK] [MASK] [MASK] in the garden every day.")
    for determiner, noun, verb in joint:
        assert (determiner in ("These", "Those")) == noun.endswith("s") == (not verb.endswith("s"))


def test_fixed_words_can_be_masked_too():
    joint = true_joint("This is great[MASK] and I[MASK] very glad to see this.")
    assert joint == pytest.approx({(",", "'m"): 1.0})


def test_scenes_are_weighed_by_how_well_they_explain_the_other_words():
    joint = true_joint("The [MASK] is red and tastes [MASK].")
    # a cherry is always red, a pepper half the time, no other fruit ever
    assert joint == pytest.approx({("cherry", "sweet"): 2 / 3, ("pepper", "hot"): 1 / 3})


def test_sampled_frequencies_agree_with_the_joint():
    masked = [
        FEELING,
        "[MASK] lost [MASK] [MASK], so [MASK] went back to the [MASK].",
        "It is [MASK] today, so she takes her [MASK].",
    ]
    counts: dict[str, Counter[tuple[str, ...]]] = {sentence: Counter() for sentence in masked}
    pieces_of = {sentence: split_pieces(sentence) for sentence in masked}
    for sampled in sample_sentences(60_000, seed=11):
        pieces = split_pieces(sampled)
        for sentence, given in pieces_of.items():
            if len(pieces) == len(given) and all(g in ("[MASK]", p) for g, p in zip(given, pieces, strict=True)):
                counts[sentence][tuple(p for g, p in zip(given, pieces, strict=True) if g == "[MASK]")] += 1
    for sentence, counted in counts.items():
        joint = true_joint(sentence)
        assert set(counted) <= set(joint)
        total = counted.total()
        assert total > 1000
        for filling, probability in joint.items():
            bound = 5 * math.sqrt(probability * (1 - probability) / total)
            assert abs(counted[filling] / total - probability) <= bound


def test_entropies_are_those_of_a_joint_worked_out_by_hand():
    joint = {("a", "x"): 0.5, ("b", "y"): 0.5}
    assert joint_entropy_nats(joint) == pytest.approx(math.log(2) / 2)
    assert independence_bound_nats(joint) == pytest.approx(math.log(2))
    assert mutual_information_nats(joint) == pytest.approx(math.log(2))
    assert marginals(joint) == [{"a": 0.5, "b": 0.5}, {"x": 0.5, "y": 0.5}]


def test_words_that_do_not_depend_on_each_other_have_no_mutual_information():
    joint = {(a, b): p * q for a, p in (("a", 0.2), ("b", 0.8)) for b, q in (("x", 0.3), ("y", 0.7))}
    assert mutual_information_nats(joint) == pytest.approx(0, abs=1e-12)


def test_the_sentiment_sentence_has_the_mutual_information_of_its_scene():
    # I(adjective; emotion) = H(scene) - H(scene | emotion), and only "surprised" (one in six) leaves it open
    h_scene = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert mutual_information_nats(true_joint(FEELING)) == pytest.approx(h_scene * 5 / 6, abs=1e-12)


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("This is it.", "has no [MASK]"),
        ("This is [MASK], and I'm very hungry to see this.", "is not a sentence of the grammar"),
    ],
)
def test_what_is_no_masked_sentence_of_the_grammar_is_refused(sentence, reason):
    with pytest.raises(ValueError, match=rf"^{re.escape(f'`{sentence}` {reason}')}$"):
        true_joint(sentence)


def test_every_word_of_the_grammar_is_one_token_of_a_small_vocabulary():
    tokenizer = train_bpe(sample_sentences(20_000, seed=0), 850, 2, SilentProgress())
    for template in templates():
        for scene in template.scenes:
            for position, options in enumerate(choices_of(template, scene)):
                for word in options:
                    blank = " " if position and word.isalpha() else ""
                    assert len(tokenizer.encode(blank + word)) == 1, word


def test_pieces_are_the_tokens_of_a_trained_tokenizer():
    tokenizer = train_bpe(sample_sentences(20_000, seed=0), 1000, 2, SilentProgress())
    for sentence in sample_sentences(300, seed=5):
        assert [tokenizer.token_text(i) for i in tokenizer.encode(sentence)] == list(split_pieces(sentence))
