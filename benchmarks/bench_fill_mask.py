"""Joint fillings of text beside the pipeline `fill-mask` of transformers, on an MLM twin that `exlm export` wrote.

    python benchmarks/bench_fill_mask.py RUN TWIN EXPORTED FILE [--sequences 150]

In P passes both fill their surest masks and read the text again; T passes are as many as masks. A row has the texts
whose hidden tokens all come back, the tokens that do, how improbable the twin finds the filling when it is asked one
mask after another (nats, lower fits together better), and the processor time of a text.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from transformers import pipeline

from bench_fill import IntArray, Masked, chain_nll, choose, fill, places_of, read_sequences
from exlm_cli.train.pretrained import load_pretrained

MOST_TEXTS = 100


class FillMask:
    """The pipeline, asked several times."""

    def __init__(self, exported: str) -> None:
        self._pipeline = pipeline("fill-mask", model=exported, device="cpu")
        self._tokenizer = self._pipeline.tokenizer

    def reads(self, ids: IntArray) -> bool:
        """Return whether the text of these tokens is read as them."""
        return bool(self._tokenizer(self._text(ids))["input_ids"] == ids.tolist())

    def fill(self, ids: IntArray, places: IntArray, passes: int) -> IntArray:
        """Return the tokens with the masks at `places` filled."""
        filled, left = ids.copy(), list(places)
        for remaining in range(passes, 0, -1):
            if not left:
                break
            answers = self._pipeline(self._text(filled), top_k=1)
            best = [answer[0] if isinstance(answer, list) else answer for answer in answers]
            size = math.ceil(len(left) / remaining)
            taken = np.argsort([-answer["score"] for answer in best], kind="stable")[:size].tolist()
            for at in taken:
                filled[left[at]] = best[at]["token"]
            left = [place for at, place in enumerate(left) if at not in taken]
        return filled

    def _text(self, ids: IntArray) -> str:
        return str(self._tokenizer.decode(ids[1:-1].tolist(), clean_up_tokenization_spaces=False))


def main() -> None:
    """Measure, and print a line for each kind of masks, method and number of passes."""
    parser = argparse.ArgumentParser(description="Joint fillings beside the pipeline fill-mask.")
    parser.add_argument("run")
    parser.add_argument("twin", help="its MLM twin")
    parser.add_argument("exported", help="the twin as `exlm export` wrote it")
    parser.add_argument("file", help="text that was not trained on")
    parser.add_argument("--sequences", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run, twin = (load_pretrained(Path(name), device="cpu") for name in (options.run, options.twin))
    masker = FillMask(options.exported)
    sequences = read_sequences(run, options.file, options.sequences, seed=1)
    for name, place in places_of(run, 1).items():
        if not name.startswith(("two neighbours", "span", "8")):
            continue
        rows = []
        chosen = choose(sequences, place, 1)
        for ids, places in zip(chosen.ids, chosen.places, strict=True):
            masked = ids.copy()
            masked[places] = run.tokenizer.mask_id
            if masker.reads(masked) and len(rows) < MOST_TEXTS:
                rows.append((ids, masked, places))
        for passes in (1, len(rows[0][2])):
            for method in ("exlm", "fill-mask"):
                began, filled = time.process_time(), []
                for ids, masked, places in rows:
                    is_ours = method == "exlm"
                    filled.append(
                        fill(run, ids, places, passes, is_joint=True)
                        if is_ours
                        else masker.fill(masked, places, passes)
                    )
                cpu_ms = 1000 * (time.process_time() - began) / len(rows)
                right = np.array(
                    [new[places] == ids[places] for new, (ids, _, places) in zip(filled, rows, strict=True)]
                )
                nats = chain_nll(twin, Masked(filled, [places for _, _, places in rows])).mean()
                print(
                    f"{name}, {len(rows)} texts, {method}, {passes} passes: back {right.all(1).mean():.0%}, "
                    f"tokens {right.mean():.0%}, {nats:.2f} nats, {cpu_ms:.0f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
