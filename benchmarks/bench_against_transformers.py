"""Pre-training as whole programs: `exlm pretrain` beside a script for the Trainer of Hugging Face transformers.

    python benchmarks/bench_against_transformers.py [--text FILE] [--megabytes 15] [--steps 24] [--quick] [--table]

`exlm` trains an MLM and an ExLM (`text-small`), `train_with_transformers.py` a BERT and a ModernBERT: about
1.4 M parameters, the same text, byte-level BPE of 4,096 tokens, sequences of 128, 38.7 % of the tokens masked, float32,
no dropout, fused AdamW, SDPA, one thread. Each is a process of its own, watched from outside:

- Tokens per CPU second: the processor time of the program and its children between two lines of its log, which it
  writes after each step; the median over the steps after the first four. Start and tokenising are not in it.
- Peak memory: of the program and its children together, tokenising included.
- Cache: the folder of tokenised text, which starts empty and is kept for two further runs with another seed.
- Interrupted: runs of a quarter of the batch get SIGINT or SIGKILL half-way and go on from what is left; their weights
  are compared with those of an undisturbed run, bit by bit. These run two at a time, and nothing of them is timed.

`accelerate`, which the Trainer needs, must be installed. `--table` prints the table of the rows that are there.
"""

import argparse
import csv
import importlib.metadata
import importlib.util
import io
import lzma
import shlex
import signal
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import harness
from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.ops.alignment import build
from process_tree import Watched, rates
from whole_programs import SCRIPT, ExlmProgram, Plan, Program, TrainerProgram

NAME = "against_transformers"
SEQUENCES, LENGTH, SETTLED = 32, 128, 4
LANES = 2
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def megabytes(folder: Path) -> float:
    """Return the size of the files in a folder in MB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of weights; 0 where all bits are the same."""
    assert a.keys() == b.keys(), "different models"
    return max(0.0 if torch.equal(a[name], b[name]) else float((a[name] - b[name]).abs().max()) for name in a)


def count_lines(source: str) -> tuple[int, int]:
    """Return the lines of a Python source that are neither blank nor comment nor docstring, and its statements."""
    lines, num_statements, first = set(), 0, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            num_statements += not first
            first = True
        elif token.type not in _NO_CODE:
            if first and token.type == tokenize.STRING:  # a docstring
                continue
            first = False
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines), num_statements


def measure_run(program: Program, run: Path, plan: Plan) -> dict[str, object]:
    """Return the columns of an undisturbed run with an empty cache."""
    watched = ended(program, program.watch(program.start(run, plan), run))
    by_cpu, elapsed = rates(watched.moments, plan.sequences * LENGTH, SETTLED)
    spread = harness.Spread.of(by_cpu)  # milliseconds in name only
    lines, statements = (1, 1) if isinstance(program, ExlmProgram) else count_lines(SCRIPT.read_text())
    return {
        "program": program.name,
        "parameters": sum(tensor.numel() for tensor in program.weights(run).values()),
        "tokens_per_cpu_s": round(spread.median_ms),
        "p20": round(spread.p20_ms),
        "p80": round(spread.p80_ms),
        "tokens_per_s": round(harness.Spread.of(elapsed).median_ms),
        "steps": len(by_cpu),
        "peak_mib": round(watched.peak_mib),
        "cache_mb": round(megabytes(program.cache), 1),
        "run_mb": round(megabytes(run), 1),
        "lines": lines,
        "statements": statements,
        "saves_every": program.usual_interval(run),
    }


def ended(program: Program, watched: Watched) -> Watched:
    """Return what was seen of a program that should have ended well."""
    if watched.code:
        raise RuntimeError(f"{program.name} ended with {watched.code}:\n{watched.output[-3000:]}")
    return watched


def measure_interruptions(program: Program, folder: Path, num_steps: int) -> dict[str, object]:
    """Return the columns of the interrupted runs, and the size of the cache after three runs."""
    plan = Plan(num_steps, SEQUENCES // 4, seed=2)
    saving = Plan(num_steps, SEQUENCES // 4, seed=2, save_every=num_steps // 3)
    for name in ("undisturbed", "again"):
        ended(program, program.watch(program.start(folder / name, plan), folder / name))
    undisturbed = program.weights(folder / "undisturbed")
    found: dict[str, object] = {
        "cache_mb_of_three": round(megabytes(program.cache), 1),
        "again_differs": difference(undisturbed, program.weights(folder / "again")),
    }
    disturbed = {
        "sigint": (plan, signal.SIGINT),
        "sigkill": (plan, signal.SIGKILL),
        "saved": (saving, signal.SIGKILL),
    }
    for name, (asked, number) in disturbed.items():
        run = folder / name
        command = program.start(run, asked)
        watched = program.watch(command, run, (num_steps // 2, number))
        if watched.code == 0:
            raise RuntimeError(f"{program.name} ended before {number.name}")
        last = program.last(run)
        found |= {
            f"{name}_at": watched.moments[-1].step,
            f"{name}_left": last[0] if last else "",
            f"{name}_says_how": "resume" in watched.output,
            f"{name}_differs": "",
        }
        if last:
            ended(program, program.watch(program.go_on(run, command), run))
            found[f"{name}_differs"] = difference(undisturbed, program.weights(run))
    return {**found, "interrupted_steps": num_steps, "saved_every": saving.save_every}


def table_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a Markdown table, a column for each program."""
    return "\n".join(
        [
            f"| | {' | '.join(row['program'] for row in rows)} |",
            "|---" * (len(rows) + 1) + "|",
            *(f"| {title} | {' | '.join(cell(row) for row in rows)} |" for title, cell in CELLS.items()),
        ]
    )


def after_signal(row: Mapping[str, str], name: str) -> str:
    """Return in words what a signal left and what became of it."""
    if not row[f"{name}_left"]:
        return f"nothing (the first checkpoint comes at step {row['saves_every']})"
    left = f"step {row[f'{name}_left']} of {row[f'{name}_at']}"
    says = " and the command to go on" if row[f"{name}_says_how"] == "True" else ""
    return f"{left}{says}; then {bits(row[f'{name}_differs'])}"


def bits(differs: str) -> str:
    """Return in words how far weights differ."""
    return "the same bits" if float(differs) == 0 else f"weights differ by up to {float(differs):.1g}"


def written(row: Mapping[str, str]) -> str:
    """Return in words what a user writes."""
    return "one command" if row["lines"] == "1" else f"{row['lines']} lines ({row['statements']} statements)"


CELLS = {
    "parameters, millions": lambda row: f"{int(row['parameters']) / 1e6:.2f}",
    "tokens per CPU second (p20 to p80)": lambda row: (
        f"**{int(row['tokens_per_cpu_s']):,}** ({int(row['p20']):,} to {int(row['p80']):,})"
    ),
    "peak memory, MiB": lambda row: f"{int(row['peak_mib']):,}",
    "cache after one run, after three, MB": lambda row: f"{row['cache_mb']}, {row['cache_mb_of_three']}",
    "folder of the run, MB": lambda row: row["run_mb"],
    "the user writes": written,
    "the same command twice": lambda row: bits(row["again_differs"]),
    "left by SIGINT half-way, usual settings": lambda row: after_signal(row, "sigint"),
    "left by SIGKILL, usual settings": lambda row: after_signal(row, "sigkill"),
    "left by SIGKILL, frequent checkpoints": lambda row: after_signal(row, "saved"),
}
"""Cells of a column of the table, by the title of their row."""


def write_text(source: Path | None, size_mb: float, target: Path) -> None:
    """Write the whole lines in the first megabytes of a text file, or sentences of the bundled grammar."""
    num_bytes = int(size_mb * 1e6)
    if source is None:
        text = "".join(f"{row}\n" for row in sample_sentences(num_bytes // 50, seed=0)).encode()
    else:
        with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as file:
            text = file.read(num_bytes)
    target.write_bytes(text[: text.rindex(b"\n") + 1])


def programs_in(folder: Path, text: Path) -> list[Program]:
    """Return the four programs, each with a cache of its own."""

    def cache(name: str) -> Path:
        (folder / name / "cache").mkdir(parents=True)
        return folder / name / "cache"

    return [
        ExlmProgram("exlm MLM", text, cache("mlm"), "text-small-mlm"),
        ExlmProgram("exlm ExLM, k = 4", text, cache("exlm"), "text-small"),
        TrainerProgram("BERT, Trainer", text, cache("bert"), "bert"),
        TrainerProgram("ModernBERT, Trainer", text, cache("modernbert"), "modernbert"),
    ]


def measure(text: Path | None, size_mb: float, num_steps: int, num_interrupted: int) -> Iterator[dict[str, object]]:
    """Yield a row for each program."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(text, size_mb, folder / "text.txt")
        if build.find_library("cpu") is None:  # a wheel brings it, a checkout builds it once
            build.build_library("cpu")
        programs = programs_in(folder, folder / "text.txt")
        rows = []
        for program in programs:
            rows.append(measure_run(program, program.cache.with_name("run"), Plan(num_steps, SEQUENCES)))
            print(f"{program.name}: {rows[-1]['tokens_per_cpu_s']:,} tokens per CPU second", flush=True)
        with ThreadPoolExecutor(LANES) as lanes:
            interrupted = lanes.map(
                lambda program: measure_interruptions(program, program.cache.parent, num_interrupted), programs
            )
            for row, further in zip(rows, interrupted, strict=True):
                where = {"text": "bundled:grammar" if text is None else text.name, "mb": size_mb}
                yield {**row, **further, **where}


def versions() -> dict[str, str]:
    """Return the versions of the other side."""
    return {name: importlib.metadata.version(name) for name in ("transformers", "accelerate", "datasets")}


def main() -> None:
    """Print the table and append its rows to `results/against_transformers.csv`."""
    parser = argparse.ArgumentParser(description="exlm pretrain beside the Trainer of transformers, as whole programs")
    parser.add_argument("--text", type=Path, help="a text file, also .xz; none: the bundled grammar")
    parser.add_argument("--megabytes", default=15.0, type=float, help="so much of it")
    parser.add_argument("--steps", default=24, type=int, help="steps of the runs that are timed")
    parser.add_argument("--interrupted-steps", default=12, type=int, help="steps of the runs that are interrupted")
    parser.add_argument("--quick", action="store_true", help="8 and 12 steps on 0.5 MB, no rows written")
    parser.add_argument("--table", action="store_true", help="print the table of the last rows and stop")
    arguments = parser.parse_args()
    path = harness.RESULTS_DIR / f"{NAME}.csv"
    if arguments.table:
        with path.open(newline="") as file:
            print(table_of(list(csv.DictReader(file))[-4:]))
        return
    if importlib.util.find_spec("accelerate") is None:
        sys.exit("the Trainer of transformers needs accelerate: pip install accelerate")
    torch.set_num_threads(1)  # rows give the threads of the programs
    sizes = (0.5, 8, 12) if arguments.quick else (arguments.megabytes, arguments.steps, arguments.interrupted_steps)
    rows = [
        {**row, **versions(), **harness.surroundings(torch.device("cpu"))} for row in measure(arguments.text, *sizes)
    ]
    if not arguments.quick:
        for row in rows:
            harness.append_row(NAME, row)
    print(table_of([{name: str(value) for name, value in row.items()} for row in rows]))
    print(f"\n{shlex.join(sys.argv)}")


if __name__ == "__main__":
    main()
