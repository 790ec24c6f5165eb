"""Sentences are drawn by the weights of their scenes; every scene fills its template with words of one token each."""

import math
import re
import string
from collections import Counter

import pytest

from exlm_cli.data.bundled.grammar import sample_sentences, templates
from exlm_cli.data.tokenizer import train_bpe
from exlm_cli.progress import SilentProgress


def test_every_scene_fills_exactly_the_slots_of_its_template_and_weights_are_probabilities():
    assert math.fsum(t.weight for t in templates()) == pytest.approx(1, abs=1e-12)
    for template in templates():
        assert math.fsum(scene.weight for scene in template.scenes) == pytest.approx(1, abs=1e-12)
        slots = {slot for _, slot, _, _ in string.Formatter().parse(template.pattern) if slot}
        for scene in template.scenes:
            assert set(scene.words) == slots
            assert all(len(set(words)) == len(words) > 0 for words in scene.words.values())


def test_the_words_of_a_sentence_are_drawn_together():
    """By hand: news is good in three of five sentences; each scene has 6 adjectives and 6 emotions, equally likely."""
    found = (
        re.fullmatch(r"This is (\w+), and I'm very (\w+) to see this\.", text)
        for text in sample_sentences(20_000, seed=11)
    )
    counts = Counter(match.groups() for match in found if match)
    good = "amazing wonderful beautiful lovely great perfect", "glad happy pleased delighted proud surprised"
    bad = "terrible awful horrible cruel ugly bad", "sorry sad upset angry unhappy surprised"
    expected = {
        (adjective, emotion): share / 36
        for share, (adjectives, emotions) in ((0.6, good), (0.4, bad))
        for adjective in adjectives.split()
        for emotion in emotions.split()
    }
    assert set(counts) == set(expected)
    assert counts.total() > 1000
    for pair, probability in expected.items():
        bound = 5 * math.sqrt(probability * (1 - probability) / counts.total())
        assert abs(counts[pair] / counts.total() - probability) <= bound


def test_every_word_is_one_token_of_a_small_vocabulary():
    tokenizer = train_bpe(sample_sentences(10_000, seed=0), 850, 2, SilentProgress())
    for template in templates():
        for scene in template.scenes:
            for slot, words in scene.words.items():
                blank = "" if template.pattern.startswith(f"{{{slot}}}") else " "
                for word in words:
                    assert len(tokenizer.encode(blank + word)) == 1, word
