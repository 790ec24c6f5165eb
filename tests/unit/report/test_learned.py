"""What a run says it learned, and where it warns of a model that has learned nothing."""

import pytest

from exlm_cli.files import write_json
from exlm_cli.report.learned import describe_learned, warn_of_unlearned


def learned(loss, independent=None, *, tokens=100_000_000, kind="text"):
    figures = {"loss_given_length": loss, "mask_accuracy": 0.4}
    figures |= {} if independent is None else {"loss_independent": independent}
    return describe_learned(figures, 7.0, 0.04, num_tokens=tokens, num_parameters=1_000_000, kind=kind)


@pytest.mark.parametrize(
    ("loss", "begins"), [(7.2, "nothing yet"), (6.95, "nothing yet"), (6.9, "little"), (3.0, "its loss is 4.00 nats")]
)
def test_a_loss_is_told_by_its_distance_from_word_frequencies(loss, begins):
    assert learned(loss).sentences()[0].startswith(begins)
    assert learned(loss).is_at_unigrams == begins.startswith("nothing")


def test_what_the_dag_knows_is_told_of_a_model_that_knows_something():
    assert "0.028 nats a token" in learned(3.0, 3.028).sentences()[1]
    assert "nothing yet" in learned(3.0, 3.001).sentences()[1]
    assert len(learned(7.0, 7.1).sentences()) == 1
    assert len(learned(3.0).sentences()) == 1


@pytest.mark.parametrize("figures", [{}, {"loss_given_length": float("nan"), "mask_accuracy": 0.0}])
def test_a_validation_that_scored_nothing_says_nothing(figures):
    assert describe_learned(figures, 7.0, 0.1, num_tokens=1, num_parameters=1, kind="text") is None


def run_with(folder, loss, unigram_loss):
    environment = {"exlm_version": None, "torch_version": None, "numpy_version": None, "git_commit": None}
    environment |= {"python_version": "3", "platform": "here", "command": "pretrain"}
    write_json(folder / "run.json", environment | {"unigram_loss": unigram_loss, "unigram_accuracy": 0.1})
    row = f'{{"kind": "valid", "step": 4, "loss": {loss}, "loss_given_length": {loss}, "mask_accuracy": 0.1}}\n'
    (folder / "metrics.jsonl").write_text(row)
    return folder / "checkpoints" / "step-4"


def test_a_picture_of_a_model_at_unigram_level_comes_with_a_warning(tmp_path):
    assert "chance" in warn_of_unlearned(run_with(tmp_path, 6.99, 7.0), "text")
    assert warn_of_unlearned(run_with(tmp_path, 3.0, 7.0), "text") is None


def test_a_checkpoint_without_a_reference_brings_no_warning(tmp_path):
    assert warn_of_unlearned(tmp_path, "text") is None
    checkpoint = run_with(tmp_path, 6.99, 7.0)
    assert warn_of_unlearned(checkpoint.with_name("step-3"), "text") is None
    (tmp_path / "metrics.jsonl").unlink()
    assert warn_of_unlearned(checkpoint, "text") is None
