"""The sentence of the study of collapses, as the models of its variants read it."""

import pytest

import study_collapse as study


@pytest.mark.parametrize(("variant", "k"), [("paper", study.K), ("mlm", 1)])
def test_the_sentence_has_two_masks_of_k_states_whatever_its_cue(variant, k):
    batches = study.sentence_batches(study.build_recipe(study.VARIANTS[variant], steps=100, seed=0))
    assert [int((batch.node_mask >= 0).sum()) for batch in batches] == [2 * k] * len(study.CUES)
    assert [batch.target_lengths.tolist() for batch in batches] == [[2]] * len(study.CUES)
