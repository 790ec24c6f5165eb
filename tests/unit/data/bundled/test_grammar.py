"""Sentences depend on the seed alone; every scene fills its template; weights are probabilities."""

import math
import string

import pytest

from exlm_cli.data.bundled.grammar import sample_sentences, templates


def test_every_scene_fills_exactly_the_slots_of_its_template():
    for template in templates():
        slots = {slot for _, slot, _, _ in string.Formatter().parse(template.pattern) if slot}
        for scene in template.scenes:
            assert set(scene.words) == slots
            assert all(len(set(words)) == len(words) > 0 for words in scene.words.values())


def test_weights_are_probabilities():
    assert math.fsum(t.weight for t in templates()) == pytest.approx(1, abs=1e-12)
    for template in templates():
        assert math.fsum(s.weight for s in template.scenes) == pytest.approx(1, abs=1e-12)


def test_feelings_are_the_sentences_of_the_grammar_that_tell_good_news_from_bad():
    texts = set(sample_sentences(3000, 0, "feelings"))
    assert texts <= set(sample_sentences(60000, 0))
    patterns = {template.pattern for template in templates("feelings")}
    assert patterns == {
        t.pattern for t in templates() if len(t.scenes) == 2 and [s.weight for s in t.scenes] == [0.6, 0.4]
    }
    assert sum(template.weight for template in templates("feelings")) == pytest.approx(1.0)
