"""Joint fillings of the masks of many texts, with exact probabilities.

Axes: S nodes, T masks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exlm_cli.dag.build import dags_of_inputs
from exlm_cli.dag.fillings import Filling, n_best_fillings
from exlm_cli.dag.graph import Dag, FloatArray, token_occupancy
from exlm_cli.dag.read import read_masked_rows
from exlm_cli.errors import DataError
from exlm_cli.fill.words import MaskWords
from exlm_cli.progress import Progress
from exlm_cli.train.pretrained import Pretrained


@dataclass(frozen=True)
class FillSettings:
    """What is asked of every row.

    Attributes:
        top: Most probable fillings to find.
    """

    top: int = 10


@dataclass(frozen=True)
class Line:
    """One filling.

    Attributes:
        filling: The words that fill the masks, as `MaskWords` writes them.
        filled: The text with its masks filled.
        log_prob: Its log-probability, nats, among all fillings with one token for each mask.
        log_prob_alone: The sum of those of its tokens, each mask on its own.
        is_proven: Whether no filling that is missing is more probable than the last one that is listed.
    """

    filling: str
    filled: str
    log_prob: float
    log_prob_alone: float
    is_proven: bool


@dataclass(frozen=True)
class FilledRow:
    """Fillings of one text, best first.

    Attributes:
        problem: Why it has none; empty where it has.
        notes: What a report says about its reading.
    """

    lines: tuple[Line, ...] = ()
    problem: str = ""
    notes: tuple[str, ...] = ()


def fill_texts(
    pretrained: Pretrained, texts: Sequence[str], settings: FillSettings, progress: Progress
) -> Iterator[FilledRow]:
    """Yield the fillings of each text, in order; one that cannot be filled has a problem."""
    masked, problems = read_masked_rows(pretrained, texts)
    readable = [one for one in masked if one is not None]
    dags = dags_of_inputs(pretrained.model, pretrained.tokenizer, pretrained.recipe, readable)
    words = MaskWords(pretrained.tokenizer)
    with progress.bar("fillings", len(texts)) as bar:
        for number, (one, problem) in enumerate(zip(masked, problems, strict=True), start=1):
            if one is None:
                yield FilledRow(problem=problem)
            else:
                try:
                    yield FilledRow(tuple(_fill(next(dags), settings, words)), notes=one.notes)
                except DataError as error:
                    yield FilledRow(problem=error.message)
            bar.update(number)


def _fill(dag: Dag, settings: FillSettings, words: MaskWords) -> Iterator[Line]:
    found = n_best_fillings(dag, settings.top)
    occupancy_TS = token_occupancy(dag)
    for filling in found.fillings:
        yield Line(
            filling=words.write(dag.text, filling.tokens_by_mask),
            filled=filling.text,
            log_prob=filling.log_prob - found.log_prob_length,
            log_prob_alone=_log_prob_alone(dag, occupancy_TS, filling),
            is_proven=found.is_proven,
        )


def _log_prob_alone(dag: Dag, occupancy_TS: FloatArray, filling: Filling) -> float:
    """Return the log of the product of the marginal probabilities of the tokens, given T of them."""
    tokens = [token for (token,) in filling.tokens_by_mask]
    if dag.chain is not None:
        own_TV = dag.chain.own_log_probs
        return math.fsum(own_TV[range(len(tokens)), tokens].tolist())
    emitted_ST = np.exp(dag.node_log_probs[:, tokens])
    marginals_T = np.einsum("ts,st->t", occupancy_TS, emitted_ST)
    return math.fsum(map(math.log, marginals_T.tolist()))
