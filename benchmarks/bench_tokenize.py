"""Benchmark of tokenising: `exlm tokenize` beside `datasets.map` with the same tokenizer.

    python benchmarks/bench_tokenize.py [--text FILE] [--rows 300000] [--rounds 5] [--quick]

Both go from the lines of a text file to token ids on disk: ours with the hash of the file, the check of every row and
the list of skipped ones; theirs with `load_dataset("text")` and `map(batched=True)`. The ids are compared. Every run
has a process of its own, and the two take turns. Time is without imports; `cpu_ms` is the processor time of all
threads, which other work on the machine changes least. Memory is the peak of resident anonymous memory above that
before the run, so that pages of mapped files do not count.
"""

import argparse
import contextlib
import multiprocessing
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch

import harness
from exlm_cli.config.load import load_recipe
from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.progress import SilentProgress

VOCAB_SIZE, TRAINED_ROWS = 8192, 20_000
SAMPLE_INTERVAL_S = 0.005

Tokenise = Callable[[Path, Path], None]
"""Tokenises `corpus.txt` with `tokenizer.json`, both in the first folder, and writes the second folder."""


def tokenise_with_exlm(source: Path, out: Path) -> None:
    """Write token shards as `exlm tokenize` does; `line` keeps the rows apart, as `map` does."""
    overrides = [
        f"data.train=[{source / 'corpus.txt'}]",
        f"data.valid=[{source / 'valid.txt'}]",
        f"tokenizer.path={source / 'tokenizer.json'}",
        f"data.cache_dir={out}",
        "data.sample_break=line",
        "data.sequence_length=2048",
        "model.max_length=8192",
        "train.microbatch_tokens=8192",
    ]
    prepare_data(load_recipe("text-small", overrides), progress=SilentProgress())


def tokenise_with_datasets(source: Path, out: Path) -> None:
    """Write an Arrow file of token ids."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.load(source / "tokenizer.json", "text")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": tokenizer.encode_batch(batch["text"])}

    rows = datasets.load_dataset("text", data_files=str(source / "corpus.txt"), split="train", cache_dir=str(out))
    rows.map(encode, batched=True, remove_columns=["text"])


def checksum_of_exlm(out: Path) -> int:
    """Return a checksum of all ids in order."""
    (tokens,) = out.rglob("train/tokens.bin")
    return zlib.crc32(np.fromfile(tokens, dtype="<u2").astype(np.int32).tobytes())


def checksum_of_datasets(out: Path) -> int:
    """Return a checksum of all ids in order."""
    import datasets

    (arrow,) = out.rglob("cache-*.arrow")
    ids = datasets.Dataset.from_file(str(arrow)).data.column("input_ids")
    checksum = 0
    for chunk in ids.chunks:
        checksum = zlib.crc32(chunk.flatten().to_numpy().astype(np.int32).tobytes(), checksum)
    return checksum


RUNS: dict[str, tuple[Tokenise, Callable[[Path], int]]] = {
    "exlm": (tokenise_with_exlm, checksum_of_exlm),
    "datasets": (tokenise_with_datasets, checksum_of_datasets),
}


def run_alone(name: str, source: Path, out: Path) -> tuple[float, float, float, int]:
    """Tokenise in this fresh process; return seconds elapsed and of the processor, MiB and the checksum of the ids."""
    tokenise, checksum = RUNS[name]
    if name == "datasets":
        import datasets  # noqa: F401
    with peak_anonymous_mib() as peak:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        tokenise(source, out)
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return seconds, cpu_s, peak[0], checksum(out)


@contextlib.contextmanager
def peak_anonymous_mib() -> Iterator[list[float]]:
    """Sample the anonymous memory of this process; the list holds the peak above the start after the context."""
    peak, start = [0.0], harness.status_kib("RssAnon")
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_INTERVAL_S):
            peak[0] = max(peak[0], (harness.status_kib("RssAnon") - start) / 2**10)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def write_corpus(folder: Path, text: Path | None, num_rows: int) -> int:
    """Write rows of a text file or of the bundled grammar, and a tokenizer; return the bytes of the rows."""
    if text is None:
        lines = sample_sentences(num_rows, seed=0)
    else:
        lines = (line.strip() for line in text.read_text(encoding="utf-8").splitlines())
    rows = list(islice((line for line in lines if line), num_rows))
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    (folder / "valid.txt").write_text(f"{rows[0]}\n", encoding="utf-8")
    train_bpe(rows[:TRAINED_ROWS], VOCAB_SIZE, 2, SilentProgress()).save(folder / "tokenizer.json")
    return corpus.stat().st_size


def measure(text: Path | None, num_rows: int, num_rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for each of the two."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size_bytes = write_corpus(folder, text, num_rows)
        measured: dict[str, list[tuple[float, float, float, int]]] = {name: [] for name in RUNS}
        for round_index in range(num_rounds):
            for name in list(RUNS)[:: -1 if round_index % 2 else 1]:
                out = folder / f"{name}-{round_index}"
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    measured[name].append(pool.apply(run_alone, (name, folder, out)))
    assert len({checksum for runs in measured.values() for *_, checksum in runs}) == 1, "the ids differ"
    for name, runs in measured.items():
        times_ms = [1000 * seconds for seconds, *_ in runs]
        yield {
            "by": name,
            "text": "bundled:grammar" if text is None else text.name,
            "mb": round(size_bytes / 1e6, 2),
            **{key: round(value) for key, value in asdict(harness.Spread.of(times_ms)).items()},
            "cpu_ms": round(median(1000 * cpu_s for _, cpu_s, *_ in runs)),
            "mb_per_s": round(size_bytes / 1e3 / median(times_ms), 2),
            "peak_mib": round(median(mib for *_, mib, _ in runs), 1),
            "rounds": num_rounds,
        }


def main() -> None:
    """Print both results and append their rows to `results/tokenize.csv`."""
    parser = argparse.ArgumentParser(description="Time and memory of tokenising, beside datasets.map")
    parser.add_argument("--text", type=Path, help="a text file, one row a line; none: the bundled grammar")
    parser.add_argument("--rows", default=300_000, type=int, help="at most so many rows")
    parser.add_argument("--rounds", default=5, type=int, help="runs of each")
    parser.add_argument("--quick", action="store_true", help="two rounds of 20,000 rows, no rows written")
    arguments = parser.parse_args()
    num_rows, num_rounds = (20_000, 2) if arguments.quick else (arguments.rows, arguments.rounds)
    for row in measure(arguments.text, num_rows, num_rounds):
        times = f"{row['median_ms']} ms ({row['mb_per_s']} MB/s), {row['cpu_ms']} ms CPU"
        print(f"{row['by']}: {times}, {row['peak_mib']} MiB", flush=True)
        if not arguments.quick:
            harness.append_row("tokenize", {**row, **harness.surroundings(torch.device("cpu"))})


if __name__ == "__main__":
    main()
