"""Study of the start of the DAG: what each part of the transition head and of its start is worth on real data.

Pinned to commit 3d172fa5 (`README.md`); its rows were made at 422a1f8 to c7aa13f, and each names its own.

Trains variants of `text-small` (bytes, k = 4) and `smiles-small` (k = 2) with two layers of width 64 for 1,000 steps.
Each data set, variant and seed is a row of `results/start.csv`; a row that exists is not trained again. Most
variants are settings of `exlm pretrain --set`. Fixed edges, scores by distance and emissions of the own mask alone are
no recipe keys and are implemented here.

    python studies/start.py --list
    python studies/start.py DATA --sets text smiles --variants "k = 1" seeing --seeds 1 2 3
    python studies/start.py --table

DATA is a folder with `text/wikipedia_en_{train,valid}.txt.xz` and `smiles/{train,valid}.txt.xz`. `--table` prints means
over seeds, and the differences from the MLM of the same seed with their 95 % interval.
"""

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from exlm_cli.config.load import load_recipe
from exlm_cli.data.batch import Batch
from exlm_cli.errors import ExlmError
from exlm_cli.model.exlm import ExlmModel, NodeStates
from exlm_cli.model.transition import TransitionHead, allowed_edges, mask_order, next_mask_edges
from exlm_cli.train.pretrain import run_pretraining
from rows import append_row, mean_column, read_rows, show_interval, surroundings

NAME = "start"
WORK = Path("runs/study_start")
MLM, LOSS = "MLM", "loss_given_length"
RESTRICTED_SHARE = 0.15
"""Share of the steps in which `own emissions` trains each state on the target of its own mask alone."""

COMMON = """
model.num_layers=2 model.num_heads=2 model.width=64 model.ffn_width=256 optim.lr=3e-3 optim.warmup_ratio=0.1
train.max_steps=1000 train.validate_every_steps=1000 train.checkpoint_every_steps=1000 train.validation_sequences=1024
train.batch_sequences=64 train.num_threads=1
"""
SETS = {
    "text": ("text-small", "text/wikipedia_en_{}.txt.xz", "data.max_rows=60000 data.sequence_length=64 "
             "tokenizer.vocab_size=261 tokenizer.train_rows=1000"),
    "long text": ("text-small", "text/wikipedia_en_{}.txt.xz", "data.max_rows=60000 data.sequence_length=128 "
                  "tokenizer.vocab_size=261 tokenizer.train_rows=1000 train.batch_sequences=32"),
    "smiles": ("smiles-small", "smiles/{}.txt.xz", "data.max_rows=200000"),
}  # fmt: skip
"""Recipe, files and settings of a data set: 9, 19 and 6 masks a sequence."""

Patch = Callable[[], contextlib.AbstractContextManager[object]]


def fixed_edges(kind: str) -> Patch:
    """Return a patch of the head: edges to the next mask alone, never trained; BOS and EOS join all lanes.

    Args:
        kind: `uniform` over the next mask's states, `lanes` to the same clone, or `one emitter`, its first clone.
    """

    def forward(head: TransitionHead, _states: Tensor, batch: Batch) -> Tensor:
        is_next, is_same_clone = next_mask_edges(batch.node_mask, batch.state_lengths, head.num_states_per_mask)
        allowed = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=False)
        node = torch.arange(allowed.shape[-1])
        is_end = node == batch.state_lengths[:, None] - 1
        if kind == "one emitter":
            is_first = (node - 1) % head.num_states_per_mask == 0
            is_next = is_next & (is_first | is_end)[:, None, :]
        elif kind == "lanes":
            is_outer = (batch.node_mask < 0)[:, :, None] | is_end[:, None, :]
            is_next = is_next & (is_same_clone | is_outer)
        weights = (is_next & allowed).to(torch.float32)
        return (weights / weights.sum(-1, keepdim=True).clamp(min=1)).log()

    return lambda: mock.patch.object(TransitionHead, "forward", forward)


def distance_scores() -> contextlib.AbstractContextManager[object]:
    """Patch the start into an ALiBi-like slope: a score falls by `start_scores` with each mask between two nodes."""

    def bias(head: TransitionHead, _allowed: Tensor, batch: Batch) -> Tensor:
        order = mask_order(batch.node_mask, batch.state_lengths, head.num_states_per_mask)
        return -head.start_scores[0] * (order[:, None, :] - order[:, :, None])

    return mock.patch.object(TransitionHead, "_start_bias", bias)


@contextlib.contextmanager
def own_emissions() -> Iterator[None]:
    """Patch emissions: in the first steps a state emits the targets of other masks with next to no probability."""
    log_emissions, shares = ExlmModel.log_emissions, [0.0]

    def restricted(model: ExlmModel, nodes: NodeStates, batch: Batch) -> Tensor:
        log_emit = log_emissions(model, nodes, batch)
        if not model.training or shares[0] >= RESTRICTED_SHARE:
            return log_emit
        target = torch.arange(log_emit.shape[1])
        return log_emit.masked_fill(batch.node_mask[:, None, :] != target[:, None], -1e4)

    with (
        mock.patch.object(ExlmModel, "log_emissions", restricted),
        mock.patch.object(TransitionHead, "fade_balance", lambda _, share: shares.__setitem__(0, share)),
    ):
        yield


@dataclass(frozen=True)
class Variant:
    """Settings of the recipe beside the common ones, and what is not a recipe key."""

    settings: str = ""
    patch: Patch = contextlib.nullcontext


HEAD = "model.transition."
FORMULA = f"{HEAD}start=formula "
VECTORS = "model.clone_embedding=nodes model.clone_init_std=1 "
GATED = f"{FORMULA}{HEAD}rope=none {HEAD}heads=2 {HEAD}position_features=true {HEAD}max_nodes=512 "
DISTANCE = f"{HEAD}rope=none {HEAD}start=next_mask {HEAD}start_strength=1 "
VARIANTS = {
    MLM: Variant("objective=mlm masking.num_states_per_mask=1 model.rope=1d"),
    # where the head knows the place of a node from; the recipe's start, then the formula's
    "seeing": Variant(),
    "blind": Variant(f"{HEAD}rope=none"),
    "formula, blind": Variant(f"{FORMULA}{HEAD}rope=none"),
    "formula, nodes": Variant(FORMULA),
    "formula, learned": Variant(f"{FORMULA}{HEAD}rope=none {HEAD}position_features=true {HEAD}max_nodes=512"),
    "distance": Variant(DISTANCE, distance_scores),
    # effects taken apart
    "k = 1": Variant("masking.num_states_per_mask=1"),
    "k = 1, formula, blind": Variant(f"masking.num_states_per_mask=1 {FORMULA}{HEAD}rope=none"),
    "one emitter": Variant("", fixed_edges("one emitter")),
    "one emitter, all attend": Variant("model.mask_attention=all", fixed_edges("one emitter")),
    "expanded after the first of two blocks": Variant("model.expand_after=1"),
    "expanded after all blocks": Variant("model.expand_after=2 model.clone_embedding=nodes model.clone_init_std=0.06"),
    "expanded after all blocks, with a penalty": Variant(
        "model.expand_after=2 model.clone_embedding=nodes model.clone_init_std=0.06 model.transition.balance=0.1"
    ),
    "uniform": Variant("", fixed_edges("uniform")),
    "fixed lanes": Variant("", fixed_edges("lanes")),
    "lanes": Variant(f"{HEAD}start=lanes"),
    "own emissions": Variant("", own_emissions),
    "formula, own emissions": Variant(FORMULA, own_emissions),
    "gated": Variant(GATED),
    "vectors": Variant(VECTORS),
    "vectors, uniform": Variant(VECTORS, fixed_edges("uniform")),
    "vectors, fixed lanes": Variant(VECTORS, fixed_edges("lanes")),
    "vectors, lanes": Variant(f"{VECTORS}{HEAD}start=lanes"),
    "vectors, formula, nodes": Variant(f"{VECTORS}{FORMULA}"),
}


def train(data: Path, name: str, variant_name: str, seed: int) -> dict[str, object]:
    """Train one cell and return its row."""
    recipe_name, files, settings = SETS[name]
    variant = VARIANTS[variant_name]
    recipe = load_recipe(
        recipe_name,
        [
            f'data.train=["{data / files.format("train")}"]',
            f'data.valid=["{data / files.format("valid")}"]',
            *COMMON.split(),
            *settings.split(),
            *variant.settings.split(),
            f"seed={seed}",
        ],
    )
    run = WORK / f"{name}-{variant_name}-{seed}".replace(" ", "-").replace(",", "").replace("=", "")
    shutil.rmtree(run, ignore_errors=True)
    began = time.process_time()
    with variant.patch():
        metrics = run_pretraining(recipe, out=run).metrics
    shutil.rmtree(run)
    columns = ("loss", "loss_given_length", "effective_states", "masks_with_0_share", "mask_accuracy")
    figures = {column: f"{metrics[column]:.5f}" if column in metrics else "" for column in columns}
    seconds = round(time.process_time() - began)
    return {"data": name, "variant": variant_name, "seed": seed, **figures, "cpu_s": seconds} | surroundings(
        torch.device("cpu")
    )


def table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table of each data set."""
    lines = []
    for name in SETS:
        cells = {(row["variant"], row["seed"]): row for row in rows if row["data"] == name}
        if cells:
            lines += ["", name, "", "| variant | seeds | loss given T | less MLM | states in use | masks passed over |"]
            lines += ["|---|---|---|---|---|---|"]
        for variant in dict.fromkeys(of for of, _ in cells):
            group = [row for (of, _), row in cells.items() if of == variant]
            twins = [(row, cells[MLM, row["seed"]]) for row in group if (MLM, row["seed"]) in cells]
            gaps = show_interval([float(row[LOSS]) - float(twin[LOSS]) for row, twin in twins])
            means = [mean_column(group, LOSS, ".3f"), gaps, mean_column(group, "effective_states", ".2f")]
            shown = [variant, str(len(group)), *means, mean_column(group, "masks_with_0_share", ".2%")]
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the study, or print what exists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["text", "smiles"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--list", action="store_true", help="print the names of the variants")
    parser.add_argument("--table", action="store_true", help="print the rows that exist as tables")
    given = parser.parse_args()
    if given.list or given.table:
        sys.stdout.write(("\n".join(VARIANTS) if given.list else table(read_rows(NAME))) + "\n")
        return
    if given.data is None:
        parser.error("DATA is missing")
    for seed in given.seeds:
        for variant in given.variants:
            for name in given.sets:
                done = {(row["data"], row["variant"], row["seed"]) for row in read_rows(NAME)}
                if (name, variant, str(seed)) not in done:
                    row = train(given.data.resolve(), name, variant, seed)
                    append_row(NAME, row)
                    sys.stderr.write(f"{name}, {variant}, seed {seed}: {row[LOSS]}\n")


if __name__ == "__main__":
    try:
        main()
    except ExlmError as error:
        sys.exit(str(error))
