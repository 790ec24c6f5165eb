"""A finished fine-tuning run, as reports see it. No torch."""

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from exlm_cli.finetune.results import RunResults
from exlm_cli.finetune.scores import MODEL, RunScores, Spread, read_scores


@dataclass(frozen=True)
class FinetunedRun:
    """A finished fine-tuning run: its name in tables, its directory, its results."""

    name: str
    run_dir: Path
    results: RunResults

    @cached_property
    def scores(self) -> RunScores:
        """Its scores, read from the directory."""
        return read_scores(self.run_dir)

    @property
    def verdict(self) -> tuple[str, ...]:
        """Sentences of the verdict, whose commands name the directory."""
        folder = shlex.quote(str(self.run_dir))
        return tuple(sentence.replace(" RUN ", f" {folder} ") for sentence in self.results.verdict)

    def average(self, metric: str, *, model: str = MODEL, label: str = "") -> Spread:
        """Return what the mean prediction of the seeds scores on the reported split, over splits of the rows."""
        return self.scores.average(self.results.scored_split, metric, model=model, label=label)

    def seeds(self, metric: str, *, model: str = MODEL) -> Spread:
        """Return what the seeds score alone on the reported split, over seeds and splits of the rows."""
        return self.scores.seeds(self.results.scored_split, metric, model=model)

    def as_json(self) -> dict[str, Any]:
        """Return results and scores for programs."""
        return {**self.results.as_json(), **self.scores.as_json()}
