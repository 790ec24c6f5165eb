"""Tables of pre-trained checkpoints: every metric in its place, and a warning where they do not compare."""

import math

from exlm_cli.experiments.evaluate import PretrainedScore
from exlm_cli.report.pretraining import pretraining_tables


def test_pretrained_checkpoints_have_a_column_each_with_the_data_that_they_were_scored_on():
    exlm = PretrainedScore(
        "a", "runs/a/checkpoints/step-30", "exlm", 30, 649_508, 55_600, "one", "19 sequences of x.txt",
        {"loss": 2.5, "perplexity": 12.18, "entropy_bits": math.nan, "effective_states": 1.5, "num_sequences": 1900.0},
    )  # fmt: skip
    mlm = PretrainedScore("b", "c", "mlm", 1000, 1, 5, "other", "x", {"loss": 2.0, "perplexity": 12345.6})
    (table,) = pretraining_tables([exlm, mlm])
    assert {row[0]: row[1:] for row in table.rows} == {
        "loss, nats per target": ("2.5000", "2.0000"),
        "perplexity": ("12.1800", "12,345.6"),
        "entropy, bits": ("not defined", "-"),
        "effective states per mask": ("1.5000", "-"),
        "sequences scored": ("1,900", "-"),
    }
    assert table.notes[0] == "a: exlm, step 30, 0.6 M parameters, 55.6 k tokens, scored on 19 sequences of x.txt"
    assert table.notes[2].startswith("these runs have different tokenizers")
    (alike,) = pretraining_tables([exlm, exlm])
    assert len(alike.notes) == 2
    assert pretraining_tables([]) == []
