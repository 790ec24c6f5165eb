"""How the models fill masked tokens of validation files, and the sentences of `clozes.yaml`."""

import itertools
import lzma
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from exlm_cli.dag.graph import Dag
from exlm_cli.dag.inspection import Inspection
from exlm_cli.ops.alignment import states_alignment_nll
from models import Checkpoint, Figures, exlm, load
from record import FILLINGS, record

CLOZES = Path(__file__).parent / "clozes.yaml"
VALIDATION = {
    "wikipedia": "text/wikipedia_en_valid.txt.xz",
    "gutenberg": "text/gutenberg_en_valid.txt.xz",
    "smiles": "smiles/valid.txt.xz",
}
TRAINING = {
    "wikipedia": ("text/wikipedia_en_train.txt.xz", "text/gutenberg_en_train.txt.xz"),
    "gutenberg": ("text/wikipedia_en_train.txt.xz", "text/gutenberg_en_train.txt.xz"),
    "smiles": ("smiles/train.txt.xz",),
}
"""Files that unigrams are counted on."""
MAX_LINES = 60_000
"""Lines of each of them that are read."""
MAX_SEQUENCES = 2048
"""Sequences of a validation file that are scored, evenly spread."""
OWN = "own"
"""The mask ratio that a model was trained with."""
MASK_RATIO = "0.15"
NUM_WORDS = 5
SEPARATOR = " | "
"""Between the fillings of a row."""


def masked_tokens(data: Path, name: str, checkpoint: Checkpoint, ratio: str) -> Figures:
    """Return loss, accuracy and entropy over masked tokens of a validation file."""
    scored = ["--data", str(data / VALIDATION[name]), "--max-sequences", str(MAX_SEQUENCES), "--no-figures"]
    scored += ["--on-invalid", "skip"] if name == "smiles" else []  # molecules that are longer than a sequence
    if ratio == OWN:
        metrics = exlm("eval", checkpoint.given, *scored)["metrics"]
    else:
        (entropy,) = exlm("eval", checkpoint.given, "--entropy", "--mask-ratios", ratio, *scored)["entropies"]
        metrics = entropy["metrics"]
    wanted = ("loss_given_length", "mask_accuracy", "entropy_bits", "effective_states")
    return {metric: metrics[metric] for metric in wanted if metric in metrics}


def unigrams(data: Path, name: str, checkpoint: Checkpoint) -> Figures:
    """Return loss, accuracy and entropy of the frequencies of tokens in training, over all tokens of a file."""
    tokenizer = load(checkpoint.given).encoder.tokenizer

    def count(path: Path, max_lines: int | None) -> NDArray[np.int64]:
        counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        with lzma.open(path, "rt", encoding="utf-8") as file:
            lines = (line.rstrip("\n") for line in itertools.islice(file, max_lines))
            while part := list(itertools.islice(lines, 1000)):
                tokens = itertools.chain.from_iterable(tokenizer.encode_batch(part))
                counts += np.bincount(np.fromiter(tokens, dtype=np.int64), minlength=len(counts))
        return counts

    frequency = 1.0 + sum(count(data / path, MAX_LINES) for path in TRAINING[name])
    frequency /= frequency.sum()
    seen = count(data / VALIDATION[name], None)
    return {
        "loss_given_length": float(-(seen @ np.log(frequency)) / seen.sum()),
        "mask_accuracy": float(seen[frequency.argmax()] / seen.sum()),
        "entropy_bits": float(-(frequency @ np.log2(frequency))),
    }


def fill_clozes(checkpoint: Checkpoint, method: str) -> Figures:
    """Fill the sentences with one mask; return how many have an accepted word among the likeliest."""
    sentences = sentences_of("singles")
    num_found = num_first = 0
    for sentence in sentences:
        inspection = load(checkpoint.given).fill(sentence["text"], num_fillings=NUM_WORDS)
        best = inspection.n_best.fillings
        words = [inspection.filled_words(filling)[0] for filling in best]
        accepted = {_plain(word) for word in sentence["accepted"]}
        found = [_plain(word) in accepted for word in words]
        num_found, num_first = num_found + any(found), num_first + found[0]
        shown = [f"{word} {inspection.share(filling):.2f}" for word, filling in zip(words, best, strict=True)]
        _record_fillings(method, checkpoint, sentence["text"], SEPARATOR.join(shown), accepted=any(found))
    return {"num_sentences": len(sentences), "accepted_among_five": num_found, "accepted_first": num_first}


def fill_pairs(checkpoint: Checkpoint, method: str) -> Figures:
    """Fill the sentences with two masks, jointly and each mask by itself.

    `joint_accepted` counts the sentences whose likeliest joint filling is accepted, `independent_accepted` those whose
    masks, each filled with its own likeliest word, are. `prefers` counts those in which the two fillings `mixed` are
    together likelier than their crossings, among the `num_odds` whose words are single tokens: masks that are
    independent give odds of 1, whatever the words are.
    """
    sentences = sentences_of("pairs")
    counts: Counter[str] = Counter(num_sentences=len(sentences))
    odds = []
    for sentence in sentences:
        inspection = load(checkpoint.given).fill(sentence["text"], num_fillings=NUM_WORDS)
        accepted = {tuple(map(_plain, words)) for words in sentence["accepted"]}

        def is_accepted(words: Iterable[str], accepted: set[tuple[str, ...]] = accepted) -> bool:
            return tuple(map(_plain, words)) in accepted

        best = [inspection.filled_words(filling) for filling in inspection.n_best.fillings]
        guess = inspection.filled_words(inspection.guess.filling)
        counts["joint_accepted"] += is_accepted(best[0])
        counts["joint_among_five"] += any(map(is_accepted, best))
        counts["independent_accepted"] += is_accepted(guess)
        counts["guess_is_another"] += best[0] != guess
        log_odds = mixed_log_odds(inspection.dag, sentence["mixed"])
        if log_odds is not None:
            odds.append(log_odds)
        _record_fillings(
            method,
            checkpoint,
            sentence["text"],
            SEPARATOR.join(
                f"{' … '.join(words)} {inspection.share(filling):.3f}"
                for words, filling in zip(best, inspection.n_best.fillings, strict=True)
            ),
            accepted=is_accepted(best[0]),
            independent=_shown_guess(inspection, guess),
            independent_accepted=is_accepted(guess),
            log_odds="" if log_odds is None else f"{log_odds:.3f}",
        )
    figures = {name: float(count) for name, count in counts.items()}
    if odds:
        figures |= {"num_odds": float(len(odds)), "prefers": float(sum(o > 1e-6 for o in odds))}
        figures["mean_log_odds"] = float(np.mean(odds))
    return figures


def mixed_log_odds(dag: Dag, mixed: Sequence[Sequence[str]]) -> float | None:
    """Return log P(a, b) P(c, d) - log P(a, d) P(c, b) of two fillings (a, b) and (c, d); None for words of two tokens.

    P is the joint probability given T tokens. The odds are 1 if the masks are independent.
    """
    (a, b), (c, d) = mixed
    pairs = [(a, b), (c, d), (a, d), (c, b)]
    tokens = {word: _tokens_of(dag, word) for word in {a, b, c, d}}
    if not all(tokens.values()):
        return None
    if dag.chain is not None:
        spelled = [torch.tensor([*itertools.product(*(tokens[word] for word in pair))]) for pair in pairs]
        one, other, crossed, back = (float(dag.chain.score(of_pair)[0].logsumexp(0)) for of_pair in spelled)
        return one + other - crossed - back
    log_probs = dag.node_log_probs.T  # (V, S)
    emissions = {word: np.logaddexp.reduce(log_probs[ids], axis=0) for word, ids in tokens.items()}
    log_emit = torch.from_numpy(np.array([[emissions[word] for word in pair] for pair in pairs]))
    # the ends emit nothing
    log_emit = log_emit.where(torch.from_numpy(dag.node_mask >= 0), -torch.inf)
    log_trans = torch.from_numpy(dag.log_trans).expand(len(pairs), -1, -1)
    lengths = torch.full((len(pairs),), 2), torch.full((len(pairs),), dag.num_nodes)
    nll = states_alignment_nll(log_emit, log_trans, *lengths).tolist()
    return float(nll[2] + nll[3] - nll[0] - nll[1])


def _tokens_of(dag: Dag, word: str) -> list[int]:
    """Return the single tokens that read as a word, with a blank before it and without."""
    spelled = (dag.tokenizer.encode(f"{blank}{word}") for blank in ("", " "))
    return [ids[0] for ids in spelled if len(ids) == 1]


def _shown_guess(inspection: Inspection, guess: Sequence[str]) -> str:
    joint, alone = inspection.share(inspection.guess.filling), inspection.guess.prob_independent
    return f"{' … '.join(guess)} {joint:.3f}, {alone:.3f} if independent"


def sentences_of(kind: str) -> list[dict[str, Any]]:
    """Return the sentences of `clozes.yaml` with one mask (`singles`) or two (`pairs`)."""
    found: list[dict[str, Any]] = yaml.safe_load(CLOZES.read_text(encoding="utf-8"))[kind]
    return found


def _plain(word: str) -> str:
    return word.strip().lower()


def _record_fillings(
    method: str,
    checkpoint: Checkpoint,
    text: str,
    fillings: str,
    *,
    accepted: bool,
    independent: str = "",
    independent_accepted: bool | str = "",
    log_odds: str = "",
) -> None:
    row = {
        "method": method,
        "weights": checkpoint.weights,
        "text": text,
        "fillings": fillings,
        "accepted": accepted,
        "independent": independent,
        "independent_accepted": independent_accepted,
        "log_odds": log_odds,
    }
    record(FILLINGS, [row])
