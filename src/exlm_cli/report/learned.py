"""What a pre-training learned, in words: beside the frequencies of tokens, of which every run knows the loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.tasks import InputKind
from exlm_cli.format import format_fixed, format_number_of, format_percent
from exlm_cli.run_dir import METRICS_FILE, RUN_FILE, read_metrics, read_run_json, run_directory

NOTHING_SHARE = 0.01
"""A loss that is below that of token frequencies by at most this share of it has learned nothing of contexts."""
LITTLE_SHARE = 0.1
"""Below this share, it has learned little: a run of a few minutes gets so far."""
KNOWN_JOINTLY_NATS = 0.005
"""From here on a DAG knows something about masked tokens together."""
USUAL_TOKENS_PER_PARAMETER = 50
"""Training tokens of small masked LMs: the bundled models have seen 83 and 104 a parameter, and 20 are the optimum for
a given cost of Hoffmann et al. (2022), whose models learn from every token and not from the masked ones alone."""


@dataclass(frozen=True)
class Learned:
    """A validation, beside the frequencies of tokens.

    Attributes:
        loss: Nats a masked token, given the number of masked tokens.
        unigram_loss: What the token frequencies of the training data reach on the same masks.
        accuracy, unigram_accuracy: Shares of the masked tokens that the model guesses, and that are the commonest one.
        known_jointly: Nats a token by which the DAG is better than if it filled each mask on its own; None for an MLM.
        times_usual: How many times as many training tokens are usual for as many parameters; 0 where nobody knows.
        kind: What the sequences are.
        before: Loss and accuracy before the first step, of a training that began with weights; else None.
    """

    loss: float
    unigram_loss: float
    accuracy: float
    unigram_accuracy: float
    known_jointly: float | None
    times_usual: float
    kind: InputKind
    before: tuple[float, float] | None = None

    @property
    def is_at_unigrams(self) -> bool:
        """Whether the loss is that of token frequencies or worse."""
        return not self.unigram_loss - self.loss > NOTHING_SHARE * self.unigram_loss

    @property
    def frequencies(self) -> str:
        """What the reference is called in sentences."""
        return "word frequencies" if self.kind == "text" else "token frequencies"

    def measures(self) -> dict[str, str]:
        """Return loss and accuracy with their references, for a terminal."""
        share, commonest = format_percent(self.accuracy), format_percent(self.unigram_accuracy)
        loss, right = f"{self.loss:.3f} nats a masked token", f"{share} of the masked tokens"
        if self.before is not None:
            began = "before the first step"
            loss, right = f"{loss}; {self.before[0]:.3f} {began}", f"{right}; {format_percent(self.before[1])} {began}"
        rows = {
            "loss": f"{loss}; {self.frequencies} {self.unigram_loss:.3f}",
            "right": f"{right}; the commonest token {commonest}",
        }
        if self.known_jointly is not None:
            rows["DAG"] = (
                f"{format_fixed(self.known_jointly, 3)} nats a masked token better than filling each mask alone"
            )
        return rows

    def sentences(self) -> list[str]:
        """Return what was learned, from the weights that the training began with or from nothing, how much longer is
        usual, and what the DAG knows.
        """
        gain = self.unigram_loss - self.loss
        if self.is_at_unigrams:
            alone = f"{self.frequencies} alone reach {self.unigram_loss:.3f} nats"
            first = f"nothing yet: {alone}, and this model {self.loss:.3f}"
            if self.before is not None:
                first += f"; before the first step {self.before[0]:.3f}"
        elif self.before is not None:
            first = self._changed_from(*self.before)
        elif gain < LITTLE_SHARE * self.unigram_loss:
            first = f"little: its loss is {gain:.2f} nats a token below {self.frequencies}"
        else:
            right = format_percent(self.accuracy)
            first = (
                f"its loss is {gain:.2f} nats a token below {self.frequencies}, and it guesses {right} of the tokens"
            )
        said = [f"{first}."]
        if self.times_usual >= 2:
            times = f"{float(f'{self.times_usual:.2g}'):,.0f}"
            said.append(f"Models of this size usually train on {times} times as many tokens.")
        if self.known_jointly is not None and not self.is_at_unigrams:
            if self.known_jointly >= KNOWN_JOINTLY_NATS:
                gained = f"{self.known_jointly:.3f} nats a token"
                said.append(f"Its DAG fills masks together {gained} better than each on its own.")
            else:
                said.append("Its DAG knows nothing yet of masks together: it fills each as if it were alone.")
        return said

    def _changed_from(self, loss: float, accuracy: float) -> str:
        """Say what the training changed of the weights that it began with."""
        change = self.loss - loss
        share, was = format_percent(self.accuracy), format_percent(accuracy)
        guesses = f"it guesses {share} of the tokens, {was} before"
        if abs(change) <= NOTHING_SHARE * loss:
            return f"hardly anything: the loss was {loss:.3f} nats a token before the first step; {guesses}"
        begins = "nothing: this training raised the" if change > 0 else "this training lowered the"
        return f"{begins} loss by {abs(change):.3f} nats a token, from {loss:.3f} to {self.loss:.3f}; {guesses}"


def describe_learned(
    metrics: Mapping[str, float],
    unigram_loss: float | None,
    unigram_accuracy: float | None,
    *,
    num_tokens: int | None,
    num_parameters: int,
    kind: InputKind,
    before: Mapping[str, float] | None = None,
) -> Learned | None:
    """Return what the metrics of a validation say; None where it scored nothing or has no reference.

    Args:
        num_tokens: Input tokens of the training; None: it began with weights, so nobody knows how many these saw.
        before: Metrics before the first step of a training that began with weights.
    """
    loss = metrics.get("loss_given_length")
    if loss is None or unigram_loss is None or unigram_accuracy is None or not math.isfinite(loss + unigram_loss):
        return None
    independent = metrics.get("loss_independent")
    return Learned(
        loss,
        unigram_loss,
        metrics["mask_accuracy"],
        unigram_accuracy,
        None if independent is None else independent - loss,
        0.0 if num_tokens is None else USUAL_TOKENS_PER_PARAMETER * num_parameters / max(1, num_tokens),
        kind,
        None if before is None else (before["loss_given_length"], before["mask_accuracy"]),
    )


def read_learned(run: Path, kind: InputKind, step: int | None = None) -> Learned | None:
    """Return what the last validation of a run says, up to a step; None where there is none, or no reference.

    Raises:
        CheckpointError: A file of the run is damaged.
    """
    if not (run / RUN_FILE).is_file() or not (run / METRICS_FILE).is_file():
        return None
    described = read_run_json(run)
    rows = [row for row in read_metrics(run / METRICS_FILE) if row["kind"] == "valid"]
    rows = [row for row in rows if step is None or row["step"] <= step]
    reference = described.unigram_loss, described.unigram_accuracy
    return describe_learned(rows[-1], *reference, num_tokens=None, num_parameters=0, kind=kind) if rows else None


def find_unlearned(run: Path, kind: InputKind, step: int | None = None) -> str | None:
    """Return the losses of a run that is no better than token frequencies, up to a step; None where it may be.

    Raises:
        CheckpointError: A file of the run is damaged.
    """
    learned = read_learned(run, kind, step)
    if learned is None or not learned.is_at_unigrams:
        return None
    return (
        f"its loss is {learned.loss:.3f} nats a masked token, and {learned.frequencies} alone reach "
        f"{learned.unigram_loss:.3f}"
    )


def warn_of_unlearned(checkpoint: Path, kind: InputKind) -> str | None:
    """Return a warning where a checkpoint of a run is no better than token frequencies; None where it may be.

    Raises:
        CheckpointError: A file of the run is damaged.
    """
    run = run_directory(checkpoint)
    if run == checkpoint:
        return None
    step = int(checkpoint.name.removeprefix("step-"))
    losses = find_unlearned(run, kind, step)
    if losses is None:
        return None
    steps = format_number_of(step, "step")
    return f"this model has learned nothing of contexts in {steps}, so what follows is chance: {losses}"
