"""What a run says it learned, and where it warns of a model that has learned nothing."""

import pytest

from exlm_cli.report.learned import describe_learned, warn_of_unlearned
from exlm_cli.run_dir import update_run_json


def learned(loss, independent=None, *, tokens=100_000_000, kind="text", before=None):
    figures = {"loss_given_length": loss, "mask_accuracy": 0.4}
    figures |= {} if independent is None else {"loss_independent": independent}
    began = None if before is None else {"loss_given_length": before, "mask_accuracy": 0.41}
    return describe_learned(figures, 7.0, 0.04, num_tokens=tokens, num_parameters=1_000_000, kind=kind, before=began)


@pytest.mark.parametrize(
    ("loss", "begins"), [(7.2, "nothing yet"), (6.95, "nothing yet"), (6.9, "little"), (3.0, "its loss is 4.00 nats")]
)
def test_a_loss_is_told_by_its_distance_from_word_frequencies(loss, begins):
    assert learned(loss).sentences()[0].startswith(begins)
    assert learned(loss).is_at_unigrams == begins.startswith("nothing")


@pytest.mark.parametrize(
    ("before", "says"),
    [(3.5, "this training lowered the loss by 0.500 nats a token, from 3.500 to 3.000"), (3.02, "hardly anything"),
     (2.5, "nothing: this training raised the loss by 0.500")],
)  # fmt: skip
def test_a_training_that_began_with_weights_is_told_by_what_it_changed(before, says):
    found = learned(3.0, before=before)
    assert found.sentences()[0].startswith(says)
    assert "40.0 % of the tokens, 41.0 % before" in found.sentences()[0]
    assert f"{before:.3f} before the first step" in found.measures()["loss"]
    assert learned(7.2, before=7.1).sentences()[0].endswith("before the first step 7.100.")


def test_what_the_dag_knows_is_told_of_a_model_that_knows_something():
    assert "0.028 nats a token" in learned(3.0, 3.028).sentences()[1]
    assert "nothing yet" in learned(3.0, 3.001).sentences()[1]
    assert len(learned(7.0, 7.1).sentences()) == 1
    assert len(learned(3.0).sentences()) == 1


def test_a_validation_that_scored_nothing_says_nothing():
    assert learned(float("nan")) is None


def run_with(folder, loss, unigram_loss):
    update_run_json(folder, {"command": "pretrain", "unigram_loss": unigram_loss, "unigram_accuracy": 0.1})
    row = f'{{"kind": "valid", "step": 4, "loss": {loss}, "loss_given_length": {loss}, "mask_accuracy": 0.1}}\n'
    (folder / "metrics.jsonl").write_text(row)
    return folder / "checkpoints" / "step-4"


def test_a_picture_of_a_model_at_unigram_level_comes_with_a_warning_where_there_is_a_reference(tmp_path):
    assert "chance" in warn_of_unlearned(run_with(tmp_path, 6.99, 7.0), "text")
    assert warn_of_unlearned(tmp_path, "text") is None
    checkpoint = run_with(tmp_path, 3.0, 7.0)
    assert warn_of_unlearned(checkpoint, "text") is None
    assert warn_of_unlearned(checkpoint.with_name("step-3"), "text") is None
    (tmp_path / "metrics.jsonl").unlink()
    assert warn_of_unlearned(checkpoint, "text") is None
