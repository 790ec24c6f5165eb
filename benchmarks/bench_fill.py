"""What a model knows jointly of several masks: its joint filling beside filling each mask alone, and one after another.

    python benchmarks/bench_fill.py RUN FILE [--twin RUN] [--sequences 300] [--ceilings 0] [--csv ROWS.csv]

FILE is text or SMILES that no model has trained on. Of each sequence some tokens are masked: pairs of neighbours, pairs
with a gap, spans, eight tokens anywhere, and masks as the run's own recipe draws them. All models read the same masks.
The first table has nats a sequence:

    own     each masked token on its own, as fill-mask guesses
    joint   all together by the DAG, given as many tokens as masks; an MLM has none
    chain   the same model asked once a mask, each answer filled in; mean of both directions

With a twin, an MLM trained on the same law of masks at equal FLOPs,

    gain       own of the twin less joint of the run
    available  own of the twin less its chain: what there is to know jointly
    share      gain / available, only where 0.05 nats a sequence are available

so neither a weak `own` nor an easy chain of the run itself flatters it. Without a twin the run stands in for it. In
brackets are 95 % intervals: bootstrap over sequences, paired.

The second table fills in P passes: the surest masks are filled jointly, then the rest is read again. `exact` is the
share of sequences whose tokens all come back, `tokens` that of tokens; `valid` that of molecules that RDKit reads.

`--ceilings N` asks first, without any training: of N pairs of neighbours, how much of the mutual information of the
twin's chain do k states hold whose distributions are chosen for that one context (non-negative factorisation)?
"""

import argparse
import csv
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from exlm_cli.dag.build import dag_of_tokens
from exlm_cli.dag.graph import token_marginals
from exlm_cli.dag.read import MaskedText
from exlm_cli.data.batch import MaskedSequences, expand
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.data.masking import Masker, Sequences
from exlm_cli.data.molecules import find_invalid_smiles
from exlm_cli.fill.passes import Ask, fill_inputs
from exlm_cli.progress import SilentProgress
from exlm_cli.train.evaluation import score_sequences
from exlm_cli.train.objective import Objective
from exlm_cli.train.pretrain_task import VALIDATION_EPOCH
from exlm_cli.train.pretrained import Pretrained, load_pretrained

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

NOTHING_TO_HOLD_NATS = 0.05
PASSES = (1, 2, 4, 0)
"""0: as many as masks."""
_ROWS_AT_ONCE = 32
_MOST_PASS_MASKS = 16
"""Sequences with more masks are not filled: the exact search of one takes seconds."""
_CEILING_STATES = (2, 4, 8, 16)
_CEILING_TOKENS = 384
"""Most tokens of a mask that a ceiling looks at; with fewer than 90 % of the probability a context is left out."""

Place = Callable[[IntArray, np.random.Generator], IntArray | None]
"""Chooses masked places in the tokens of a sequence, [CLS] and [SEP] included; None where it has none of the kind."""


@dataclass(frozen=True)
class Masked:
    """Sequences with the tokens that are hidden in them.

    Attributes:
        ids: Original tokens, [CLS] and [SEP] included, one array a sequence.
        places: Masked places of each.
    """

    ids: list[IntArray]
    places: list[IntArray]


def main() -> None:
    """Measure, and print both tables."""
    parser = argparse.ArgumentParser(description="Joint fillings of a model beside one mask at a time.")
    parser.add_argument("run", help="pre-training run, or bundled:NAME")
    parser.add_argument("file", help="text or SMILES that was not trained on")
    parser.add_argument("--twin", help="the MLM of equal FLOPs")
    parser.add_argument("--as-written", action="store_true", help="read SMILES as the file spells them")
    parser.add_argument("--sequences", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ceilings", type=int, default=0, metavar="N", help="pairs whose ceiling is computed first")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--no-passes", action="store_true", help="leave out the second table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = load_pretrained(Path(options.run), device="cpu")
    twin = load_pretrained(Path(options.twin), device="cpu") if options.twin else run
    if twin.tokenizer.fingerprint != run.tokenizer.fingerprint:
        raise SystemExit("error: the runs have different tokenizers\n\nhint: give the twin of this run")
    sequences = read_sequences(run, options.file, options.sequences, options.seed, is_written=options.as_written)
    console = Console(width=110)
    if options.ceilings:
        show_ceilings(console, twin, sequences, options.ceilings, options.seed)
    rows = []
    for name, place in places_of(run, options.seed).items():
        masked = choose(sequences, place, options.seed)
        if masked.ids:
            rows.append(measure_nats(name, run, twin, masked))
            console.print(f"{name}: {len(masked.ids)} sequences", style="dim")
    show_nats(console, rows, has_twin=options.twin is not None)
    filled = []
    if not options.no_passes:
        for name, place in places_of(run, options.seed).items():
            masked = choose(sequences, place, options.seed)
            filled += measure_passes(name, run, twin if options.twin else None, masked)
        show_passes(console, filled)
    if options.csv:
        head = {"run": options.run, "twin": options.twin or "", "file": Path(options.file).name}
        append_rows(options.csv, head, rows)


def read_sequences(run: Pretrained, file: str, num: int, seed: int, *, is_written: bool) -> list[IntArray]:
    """Return at most `num` sequences of a file in a hashed order, SMILES canonical unless they stay as written."""
    changed = {"valid": (file,), "train": (), "on_invalid": "skip", "cache_dir": None, "num_spellings": 1}
    data = run.recipe.data.model_copy(update=changed | {"canonical_smiles": not is_written})
    recipe = run.recipe.model_copy(update={"data": data})
    prepared = prepare_data(recipe, progress=SilentProgress(), is_trained=False, tokenizer=run.tokenizer)
    order = np.random.default_rng(seed).permutation(len(prepared.valid.lengths))[:num]
    tokens, lengths = prepared.valid.read(np.sort(order), run.tokenizer.pad_id)
    cls_id, sep_id = run.tokenizer.cls_id, run.tokenizer.sep_id
    return [np.array([cls_id, *row[:n], sep_id]) for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def places_of(run: Pretrained, seed: int) -> dict[str, Place]:
    """Return the kinds of masks that are measured, by name."""
    begins_word = word_beginnings(run)
    ordinary = run.tokenizer.is_ordinary

    def pair(gaps: Sequence[int], within: bool | None, ids: IntArray, draw: np.random.Generator) -> IntArray | None:
        gap = int(draw.choice(gaps))
        firsts = np.flatnonzero(ordinary[ids[:-gap]] & ordinary[ids[gap:]])
        if within is not None:
            firsts = firsts[begins_word[ids[firsts + gap]] != within]
        return None if not len(firsts) else int(draw.choice(firsts)) + np.array([0, gap])

    def span(length: int, ids: IntArray, draw: np.random.Generator) -> IntArray | None:
        if len(ids) < length + 6:
            return None
        places = int(draw.integers(1, len(ids) - length)) + np.arange(length)
        return places if ordinary[ids[places]].all() else None

    def anywhere(num: int, ids: IntArray, draw: np.random.Generator) -> IntArray | None:
        places = np.flatnonzero(ordinary[ids])
        return None if len(places) < 2 * num else np.sort(draw.choice(places, num, replace=False))

    def own_law(ids: IntArray, draw: np.random.Generator) -> IntArray | None:
        masker = Masker(run.recipe.masking, run.tokenizer, seed, VALIDATION_EPOCH)
        index = np.array([draw.integers(2**31)])
        return np.flatnonzero(masker.mask(Sequences(ids[None, 1:-1], np.array([len(ids) - 2]), index)).is_masked[0])

    is_text = run.recipe.data.kind == "text"
    neighbours: dict[str, Place] = (
        {
            "two neighbours within a word": functools.partial(pair, [1], True),
            "two neighbours of two words": functools.partial(pair, [1], False),
        }
        if is_text
        else {"two neighbours": functools.partial(pair, [1], None)}
    )
    return {
        "one mask": functools.partial(anywhere, 1),
        **neighbours,
        "two, gap of 2 or 3": functools.partial(pair, [2, 3], None),
        "two, gap of 4 to 8": functools.partial(pair, [4, 5, 6, 7, 8], None),
        "span of 3": functools.partial(span, 3),
        "span of 5": functools.partial(span, 5),
        "8 anywhere": functools.partial(anywhere, 8),
        "the run's own masks": own_law,
    }


def word_beginnings(run: Pretrained) -> NDArray[np.bool_]:
    """Return (V,) whether a token begins a word of text: a blank is before it, or it is no letter or digit."""
    tokenizer = run.tokenizer
    texts = [tokenizer.decode([token]) if tokenizer.is_ordinary[token] else "" for token in range(tokenizer.vocab_size)]
    return np.array([not text[:1].isalnum() for text in texts])


def choose(sequences: list[IntArray], place: Place, seed: int) -> Masked:
    """Mask every sequence that has places of a kind; the draws depend on the seed and the number of the sequence."""
    chosen = [(ids, place(ids, np.random.default_rng([seed, number]))) for number, ids in enumerate(sequences)]
    kept = [(ids, places) for ids, places in chosen if places is not None and len(places)]
    return Masked([ids for ids, _ in kept], [places for _, places in kept])


def token_nlls(pretrained: Pretrained, masked: Masked) -> tuple[list[FloatArray], FloatArray]:
    """Return the nats of each masked token on its own, and the (n,) nats of all of a sequence together given T."""
    model, tokenizer, recipe = pretrained.model, pretrained.tokenizer, pretrained.recipe
    objective = Objective(tokenizer.unk_id, 1, "auto")
    own: list[FloatArray] = [np.empty(0)] * len(masked.ids)
    joint = np.empty(len(masked.ids))
    # alike in masks and length, so that little is padding
    order = sorted(range(len(masked.ids)), key=lambda i: (len(masked.places[i]), len(masked.ids[i])))
    for start in range(0, len(order), _ROWS_AT_ONCE):
        rows = order[start : start + _ROWS_AT_ONCE]
        batch = expand(
            _masked_rows(pretrained, [masked.ids[i] for i in rows], [masked.places[i] for i in rows]),
            recipe.masking.num_states_per_mask,
            expands_input=recipe.expands_input,
            pad_id=tokenizer.pad_id,
        )
        scores = score_sequences(model, objective, batch)
        for at, i in enumerate(rows):
            own[i] = scores.token_nll[at, : len(masked.places[i])].double().numpy()
            joint[i] = float(scores.joint_nll[at])
    return own, joint


def _masked_rows(pretrained: Pretrained, ids: list[IntArray], places: list[IntArray]) -> MaskedSequences:
    tokenizer = pretrained.tokenizer
    lengths = np.array([len(row) for row in ids])
    input_ids = np.full((len(ids), lengths.max()), tokenizer.pad_id)
    is_masked = np.zeros_like(input_ids, dtype=bool)
    for row, (tokens, at) in enumerate(zip(ids, places, strict=True)):
        input_ids[row, : len(tokens)] = tokens
        is_masked[row, at] = True
    target_ids = input_ids[is_masked]
    input_ids[is_masked] = tokenizer.mask_id
    return MaskedSequences(input_ids, lengths, is_masked, target_ids, is_masked.nonzero()[1], np.arange(len(ids)))


def chain_nll(pretrained: Pretrained, masked: Masked) -> FloatArray:
    """Return the (n,) nats of each sequence's masked tokens, one asked after another; mean of both directions."""
    ids, places, owner = [], [], []
    for number, (row, at) in enumerate(zip(masked.ids, masked.places, strict=True)):
        for known in range(len(at)):
            ids += [row, row]
            # to the right the first hidden token is asked, to the left the last one
            places += [at[known:], at[: len(at) - known]]
            owner.append(number)
    own, _ = token_nlls(pretrained, Masked(ids, places))
    total = np.zeros(len(masked.ids))
    for number, rightward, leftward in zip(owner, own[::2], own[1::2], strict=True):
        total[number] += (rightward[0] + leftward[-1]) / 2
    return total


def measure_nats(name: str, run: Pretrained, twin: Pretrained, masked: Masked) -> dict[str, object]:
    """Return one row of the first table."""
    own, joint = token_nlls(run, masked)
    own_run, chain_run = np.array([nll.sum() for nll in own]), chain_nll(run, masked)
    if twin is run:
        own_twin, chain_twin = own_run, chain_run
    else:
        own_twin = np.array([nll.sum() for nll in token_nlls(twin, masked)[0]])
        chain_twin = chain_nll(twin, masked)
    gain, available = own_twin - joint, own_twin - chain_twin
    row: dict[str, object] = {
        "masks": name,
        "sequences": len(masked.ids),
        "mean_masks": round(float(np.mean([len(at) for at in masked.places])), 1),
        "own": own_run.mean(),
        "joint": joint.mean(),
        "chain": chain_run.mean(),
        "own_twin": own_twin.mean(),
        "chain_twin": chain_twin.mean(),
        "gain": gain.mean(),
        "available": available.mean(),
    }
    row["gain_low"], row["gain_high"] = interval(lambda at: gain[at].mean(), len(gain))
    if available.mean() >= NOTHING_TO_HOLD_NATS:
        row["share"] = gain.mean() / available.mean()
        row["share_low"], row["share_high"] = interval(lambda at: gain[at].mean() / available[at].mean(), len(gain))
    return row


def interval(statistic: Callable[[IntArray], float], num: int) -> tuple[float, float]:
    """Return the 95 % interval of a statistic of rows: percentiles of 1,000 resamples."""
    draw = np.random.default_rng(0)
    values = [statistic(draw.integers(num, size=num)) for _ in range(1000)]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def measure_passes(name: str, run: Pretrained, twin: Pretrained | None, masked: Masked) -> list[dict[str, object]]:
    """Return the rows of the second table for one kind of masks."""
    few = [i for i, at in enumerate(masked.places) if 1 < len(at) <= _MOST_PASS_MASKS][:100]
    if not few:
        return []
    methods = {"ExLM joint": (run, True), "ExLM alone": (run, False)}
    if not run.model.has_dag:
        methods = {"alone": (run, False)}
    if twin is not None:
        methods["twin"] = (twin, False)
    rows = []
    for method, (pretrained, is_joint) in methods.items():
        most = max(len(masked.places[i]) for i in few)
        for passes in [p for p in PASSES if p < most]:
            results = [fill(pretrained, masked.ids[i], masked.places[i], passes, is_joint=is_joint) for i in few]
            right = [filled == masked.ids[i] for i, filled in zip(few, results, strict=True)]
            at_masks = [of_row[masked.places[i]] for i, of_row in zip(few, right, strict=True)]
            row = {
                "masks": name,
                "sequences": len(few),
                "method": method,
                "passes": passes or "T",
                "exact": np.mean([of_row.all() for of_row in at_masks]),
                "tokens": np.concatenate(at_masks).mean(),
            }
            if run.recipe.data.kind == "smiles":
                texts = [run.tokenizer.decode(filled.tolist()).strip() for filled in results]
                row["valid"] = np.mean([find_invalid_smiles(text) is None for text in texts])
            rows.append(row)
    return rows


def fill(pretrained: Pretrained, ids: IntArray, places: IntArray, passes: int, *, is_joint: bool) -> IntArray:
    """Return the tokens with their masked places filled in some passes, the surest masks first; 0: one mask a pass."""
    filled = ids.copy()
    filled[places] = pretrained.tokenizer.mask_id
    if is_joint:
        (found,) = fill_inputs(pretrained, [Ask(MaskedText("", filled))], passes or len(places))
        assert not isinstance(found, str), found
        return found[0].input_ids
    left = places
    for remaining in range(passes or len(places), 0, -1):
        if not len(left):
            break
        marginal_TV = token_marginals(dag_of_tokens(pretrained.model, pretrained.tokenizer, pretrained.recipe, filled))
        tokens, sureness = marginal_TV.argmax(axis=1), marginal_TV.max(axis=1)
        taken = np.sort(np.argsort(-sureness, kind="stable")[: math.ceil(len(left) / remaining)])
        filled[left[taken]] = tokens[taken]
        left = np.delete(left, taken)
    return filled


def show_ceilings(console: Console, twin: Pretrained, sequences: list[IntArray], num: int, seed: int) -> None:
    """Print the share of the mutual information of neighbours that states chosen for each context can hold."""
    pairs = choose(sequences, functools.partial(_any_pair, twin), seed)
    held: list[list[float]] = []
    total = 0.0
    for ids, places in zip(pairs.ids[:num], pairs.places[:num], strict=True):
        joint = chain_joint(twin, ids, places)
        if joint is None:
            continue
        independent = np.outer(joint.sum(1), joint.sum(0))
        information = divergence(joint, independent)
        total += information
        held.append([information - divergence(joint, factorise(joint, k, seed)) for k in _CEILING_STATES])
    shares = ", ".join(
        f"k = {k}: {100 * of_k / total:.0f} %" for k, of_k in zip(_CEILING_STATES, np.sum(held, axis=0), strict=True)
    )
    mean = total / max(1, len(held))
    console.print(f"Ceiling over {len(held)} pairs of neighbours, {mean:.3f} nats of mutual information: {shares}")


def _any_pair(twin: Pretrained, ids: IntArray, draw: np.random.Generator) -> IntArray | None:
    ordinary = twin.tokenizer.is_ordinary
    firsts = np.flatnonzero(ordinary[ids[:-1]] & ordinary[ids[1:]])
    return None if not len(firsts) else int(draw.choice(firsts)) + np.array([0, 1])


def chain_joint(pretrained: Pretrained, ids: IntArray, places: IntArray) -> FloatArray | None:
    """Return the (C, V) joint distribution of two masks by the chain: P(first), then P(second | first) for its C
    likeliest tokens; None where these hold less than 90 % of the probability.
    """
    hidden = ids.copy()
    hidden[places] = pretrained.tokenizer.mask_id
    first_V = next(_marginals(pretrained, hidden[None]))[0]
    likeliest = np.argsort(-first_V)[:_CEILING_TOKENS]
    if first_V[likeliest].sum() < 0.9:
        return None
    revealed = np.repeat(hidden[None], len(likeliest), axis=0)
    revealed[:, places[0]] = likeliest
    second_CV = np.stack([row[0] for row in _marginals(pretrained, revealed)])
    joint = first_V[likeliest][:, None] * second_CV
    normalised: FloatArray = joint / joint.sum()
    return normalised


def _marginals(pretrained: Pretrained, input_ids: IntArray) -> Iterator[FloatArray]:
    """Yield the (T, V) distribution of each mask of each row on its own."""
    for row in input_ids:
        yield token_marginals(dag_of_tokens(pretrained.model, pretrained.tokenizer, pretrained.recipe, row))


def factorise(joint: FloatArray, k: int, seed: int, num_rounds: int = 200) -> FloatArray:
    """Return the best approximation of a joint distribution by k states, sum of weight_c P_c(a) Q_c(b): EM of Hofmann
    (1999), so that its divergence falls in every round.
    """
    draw = np.random.default_rng(seed)
    left = draw.dirichlet(np.ones(joint.shape[0]), k) + 1e-6
    right = draw.dirichlet(np.ones(joint.shape[1]), k) + 1e-6
    weighted_left = left / left.sum(1, keepdims=True) / k
    right /= right.sum(1, keepdims=True)
    for _ in range(num_rounds):
        ratio = joint / np.maximum(weighted_left.T @ right, 1e-300)
        new_left, new_right = weighted_left * (right @ ratio.T), right * (weighted_left @ ratio)
        weighted_left, right = new_left, new_right / np.maximum(new_right.sum(1, keepdims=True), 1e-300)
    approximation: FloatArray = weighted_left.T @ right
    return approximation


def divergence(joint: FloatArray, other: FloatArray) -> float:
    """Return KL(joint || other), nats."""
    is_possible = joint > 0
    return float((joint[is_possible] * np.log(joint[is_possible] / np.maximum(other[is_possible], 1e-300))).sum())


def show_nats(console: Console, rows: list[dict[str, object]], *, has_twin: bool) -> None:
    """Print the first table."""
    table = Table(title="Nats a sequence" + ("" if has_twin else "; without a twin, the run is its own"))
    columns = ["own", "joint", "chain", *(["own_twin", "chain_twin"] if has_twin else []), "gain", "available"]
    for column in ["masks", "T", *columns, "share"]:
        table.add_column(column.replace("_", " "), justify="left" if column == "masks" else "right")
    for row in rows:
        share = "nothing to hold"
        if "share" in row:
            share = "{:.0%} [{:.0%}, {:.0%}]".format(*(row[key] for key in ("share", "share_low", "share_high")))
        numbers = [f"{row[column]:.3f}" for column in columns]
        table.add_row(str(row["masks"]), f"{row['mean_masks']:g}", *numbers, share)
    console.print(table)


def show_passes(console: Console, rows: list[dict[str, object]]) -> None:
    """Print the second table: a line a kind and method, exact matches and tokens by passes."""
    passes = ["1", "2", "4", "T"]
    table = Table(title="Sequences filled as they were, % (tokens, %; valid molecules, %), by passes")
    for column in ["masks", "method", *passes]:
        table.add_column(column)
    for kind, method in dict.fromkeys((row["masks"], row["method"]) for row in rows):
        cells = {str(row["passes"]): row for row in rows if (row["masks"], row["method"]) == (kind, method)}
        texts = [
            f"{100 * cells[p]['exact']:.0f} ({100 * cells[p]['tokens']:.0f}"
            + (f"; {100 * cells[p]['valid']:.0f})" if "valid" in cells[p] else ")")
            if p in cells
            else ""
            for p in passes
        ]
        table.add_row(str(kind), str(method), *texts)
    console.print(table)


def append_rows(path: Path, head: dict[str, str], rows: list[dict[str, object]]) -> None:
    """Append the rows of the first table to a CSV file."""
    names = list(head) + list(dict.fromkeys(name for row in rows for name in row))
    names += [name for name in ("share", "share_low", "share_high") if name not in names]
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names)
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow(head | {key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})


if __name__ == "__main__":
    main()
