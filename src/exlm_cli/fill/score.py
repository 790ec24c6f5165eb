"""Scores of given fillings and of whole texts.

Axes: S nodes, T masks.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from exlm_cli.dag.build import dags_of_inputs
from exlm_cli.dag.graph import Dag, FloatArray, length_log_prob, token_marginals
from exlm_cli.dag.read import MaskedText, encode_masked, read_masked, require_size
from exlm_cli.dag.search import log_matmul
from exlm_cli.data.molecules import canonical_smiles, parse_molecule
from exlm_cli.data.tokenizer import MASK, mark_masks
from exlm_cli.errors import DataError
from exlm_cli.fill.words import MaskWords
from exlm_cli.format import format_number_of, shorten
from exlm_cli.progress import Progress
from exlm_cli.train.pretrained import Pretrained


@dataclass(frozen=True)
class ScoredText:
    """Score of one row.

    Attributes:
        log_prob: Log-probability, nats: of all masks together, given as many tokens as masks; of a text without masks
            its pseudo-log-likelihood, the sum over its tokens, each masked in turn (Salazar et al. 2020). NaN where the
            row has a problem.
        num_tokens: Tokens that it is of.
        problem: Why there is none.
        notes: What a report says about the reading.
    """

    log_prob: float = np.nan
    num_tokens: int = 0
    problem: str = ""
    notes: tuple[str, ...] = ()


def score_texts(
    pretrained: Pretrained, texts: Sequence[str], fillings: Sequence[str | None], progress: Progress
) -> Iterator[ScoredText]:
    """Yield the score of each text, with its filling or, where that is None, without masks; rows with a problem too."""
    words = MaskWords(pretrained.tokenizer)
    with progress.bar("scores", len(texts)) as bar:
        for number, (text, filling) in enumerate(zip(texts, fillings, strict=True), start=1):
            try:
                yield score_text(pretrained, text, filling, words)
            except DataError as error:
                yield ScoredText(problem=error.message)
            bar.update(number)


def score_text(pretrained: Pretrained, text: str, filling: str | None, words: MaskWords) -> ScoredText:
    """Return the score of one text.

    Raises:
        DataError: It cannot be read, has masks and no filling or a filling and no masks, or the words of the filling
            are not as many as its masks, or have letters that the vocabulary lacks.
    """
    has_masks = MASK in mark_masks(text, pretrained.recipe.data.kind)
    if filling is not None:
        return _score_filling(pretrained, text, filling, words)
    if has_masks:
        raise DataError(
            f"{shorten(text, 60)!r} has masks, and there is no filling to score",
            "give the words of its masks, parted by bars: `two|dogs`",
        )
    return _score_whole(pretrained, text)


def _score_filling(pretrained: Pretrained, text: str, filling: str, words: MaskWords) -> ScoredText:
    masked = read_masked(pretrained, text)
    given, blanks = words.split(filling), words.blanks_before(masked.text)
    if len(given) != len(blanks):
        counted = format_number_of(len(given), "word")
        raise DataError(
            f"the filling {shorten(filling, 60)!r} has {counted}, and the text {format_number_of(len(blanks), 'mask')}",
            "part the words of the masks by bars: `two|dogs`",
        )
    surfaces = [words.read(word, has_blank) for word, has_blank in zip(given, blanks, strict=True)]
    lengths = [len(words.tokens_of(surface)) for surface in surfaces]
    if max(lengths) > 1:
        several = iter(lengths)
        masked = read_masked(pretrained, re.sub(re.escape(MASK), lambda _: MASK * next(several), masked.text))
    (dag,) = dags_of_inputs(pretrained.model, pretrained.tokenizer, pretrained.recipe, [masked])
    owner = np.repeat(np.arange(len(surfaces)), lengths)
    runs = [
        "".join(surfaces[place] for place in dict.fromkeys(owner[dag.mask_run == run].tolist()))
        for run in range(int(dag.mask_run[-1]) + 1)
    ]
    return ScoredText(_log_prob_of_runs(dag, runs, words), dag.num_masks, notes=masked.notes)


def _log_prob_of_runs(dag: Dag, runs: Sequence[str], words: MaskWords) -> float:
    """Return the log-probability, given T tokens, that neighbouring masks read so, however tokens share the letters.

    A forward pass whose states are letters done and node. A chain, whose masks read the token before, scores each way
    to share the letters.
    """
    if dag.chain is not None:
        ways = list(_token_sequences(dag, runs, words))
        if not ways:
            return -np.inf
        return float(dag.chain.score(torch.tensor(ways))[0].logsumexp(0))
    reached: dict[int, FloatArray] = {0: np.full(dag.num_nodes, -np.inf)}
    reached[0][0] = 0.0
    for mask, run in enumerate(dag.mask_run.tolist()):
        if mask and run != dag.mask_run[mask - 1]:
            reached = {0: reached[len(runs[run - 1])]} if len(runs[run - 1]) in reached else {}
        after: dict[int, FloatArray] = {}
        for done, log_alpha_S in reached.items():
            log_reach_S = log_matmul(log_alpha_S[None], dag.trans)[0]
            for token, length in words.tokens_at(runs[run], done, is_start=_begins(dag, mask)):
                log_now_S = log_reach_S + dag.node_log_probs[:, token]
                end = done + length
                after[end] = np.logaddexp(after[end], log_now_S) if end in after else log_now_S
        reached = after
    if len(runs[-1]) not in reached:
        return -np.inf
    return float(log_matmul(reached[len(runs[-1])][None], dag.trans)[0, -1]) - length_log_prob(dag)


def _token_sequences(dag: Dag, runs: Sequence[str], words: MaskWords) -> Iterator[tuple[int, ...]]:
    """Yield the sequences of T tokens that read so."""

    def extended(tokens: tuple[int, ...], done: int) -> Iterator[tuple[int, ...]]:
        mask = len(tokens)
        is_last = mask == dag.num_masks
        if mask and (is_last or dag.mask_run[mask] != dag.mask_run[mask - 1]):
            if done < len(runs[dag.mask_run[mask - 1]]):
                return
            done = 0
        if is_last:
            yield tokens
            return
        for token, length in words.tokens_at(runs[dag.mask_run[mask]], done, is_start=_begins(dag, mask)):
            yield from extended((*tokens, token), done + length)

    yield from extended((), 0)


def _begins(dag: Dag, mask: int) -> bool:
    """Return whether a mask is the first token of the text, before which a blank does not count."""
    return mask == 0 and dag.input_ids[1] == dag.tokenizer.mask_id


def _score_whole(pretrained: Pretrained, text: str) -> ScoredText:
    """Return the pseudo-log-likelihood of a text, for molecules of the canonical string."""
    recipe, tokenizer = pretrained.recipe, pretrained.tokenizer
    if not text.strip():
        raise DataError("the text is empty", "leave the row out")
    if recipe.data.has_canonical_smiles:
        molecule, problem = parse_molecule(text.strip())
        if molecule is None:
            raise DataError(f"not a molecule: {problem}", "correct the row or leave it out")
        text = canonical_smiles(molecule)
    input_ids, notes = encode_masked(pretrained, text)
    require_size(pretrained, len(input_ids), 1)
    versions = []
    for place in range(1, len(input_ids) - 1):
        hidden = input_ids.copy()
        hidden[place] = tokenizer.mask_id
        versions.append(MaskedText(text, hidden))
    dags = dags_of_inputs(pretrained.model, tokenizer, recipe, versions)
    probabilities = [token_marginals(dag)[0, token] for dag, token in zip(dags, input_ids[1:-1].tolist(), strict=True)]
    with np.errstate(divide="ignore"):
        return ScoredText(float(np.log(probabilities).sum()), len(versions), notes=notes)
