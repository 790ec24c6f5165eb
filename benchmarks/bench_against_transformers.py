"""Pre-training as whole programs: `exlm pretrain` beside a script for the Trainer of Hugging Face transformers.

    python benchmarks/bench_against_transformers.py [--text FILE] [--megabytes 15] [--steps 24] [--quick]

`exlm` trains an MLM and an ExLM (`text-small`), `train_with_transformers.py` a BERT and a ModernBERT: about
1.4 M parameters, the same text, byte-level BPE of 4,096 tokens, sequences of 128, 38.7 % of the tokens masked, float32,
no dropout, fused AdamW, SDPA, one thread. Each is a process of its own with an empty cache, watched from outside:

- Tokens per CPU second: the processor time of the program and its children between two lines of its log, which it
  writes after each step; the median over the steps after the first four. Start and tokenising are not in it.
- Peak memory: of the program and its children together, tokenising included. Files that several of them map count once.
- Disk: the folder of tokenised text, and that of the run.

`accelerate`, which the Trainer needs, must be installed; it brings `psutil`.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import lzma
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

import harness
from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.ops.alignment import build
from exlm_cli.run_dir import METRICS_FILE

SCRIPT = Path(__file__).with_name("train_with_transformers.py")
SEQUENCES, LENGTH, SETTLED = 32, 128, 4
POLL_S = 0.02


class Moment(NamedTuple):
    """A look at a program that has written down another step: steps so far, time of the processor, elapsed time."""

    step: int
    cpu_s: float
    elapsed_s: float


@dataclass(frozen=True)
class Program:
    """A program that pre-trains a model on a text.

    Attributes:
        name: In the table.
        command: Its arguments.
        folder: Gets `cache`, `run` and what it prints, `log.txt`.
        steps_file, mark: File to which each step adds these bytes once.
    """

    name: str
    command: list[str]
    folder: Path
    steps_file: Path
    mark: bytes

    def watch(self) -> tuple[list[Moment], float]:
        """Run it to its end; return the moments at which steps were done, and the peak memory in MiB."""
        import psutil

        moments, peak_mib, log, start_s = [Moment(0, 0.0, 0.0)], 0.0, self.folder / "log.txt", time.perf_counter()
        settings = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "cache"),
        }
        with log.open("w") as output:
            process = psutil.Popen(self.command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | settings)
            while process.poll() is None:
                step = self.steps_file.read_bytes().count(self.mark) if self.steps_file.exists() else 0
                cpu_s, mib = usage(process)
                peak_mib = max(peak_mib, mib)
                if step > moments[-1].step:
                    moments.append(Moment(step, cpu_s, time.perf_counter() - start_s))
                time.sleep(POLL_S)
        if process.returncode:
            raise SystemExit(f"{self.name} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        return moments, peak_mib

    def measure(self) -> dict[str, object]:
        """Run it and return its row."""
        moments, peak_mib = self.watch()
        pairs = list(pairwise([moment for moment in moments if moment.step >= SETTLED]))
        by_cpu, elapsed = (
            harness.Spread.of(
                [SEQUENCES * LENGTH * (b.step - a.step) / (getattr(b, clock) - getattr(a, clock)) for a, b in pairs]
            )
            for clock in ("cpu_s", "elapsed_s")
        )
        weights = load_file(next((self.folder / "run").rglob("model.safetensors")))
        return {
            "program": self.name,
            "parameters": sum(tensor.numel() for tensor in weights.values()),
            "tokens_per_cpu_s": round(by_cpu.median),
            "p20": round(by_cpu.p20),
            "p80": round(by_cpu.p80),
            "tokens_per_s": round(elapsed.median),
            "steps": len(pairs),
            "peak_mib": round(peak_mib),
            "cache_mb": round(megabytes(self.folder / "cache"), 1),
            "run_mb": round(megabytes(self.folder / "run"), 1),
        }


def usage(process: "psutil.Process") -> tuple[float, float]:  # noqa: F821
    """Return seconds of the processor of a process, its descendants and those that have ended; and MiB of memory.

    Memory is what each has for itself, and the files of the one that maps most: they are largely the same libraries.
    """
    import psutil

    cpu_s, own_bytes, shared_bytes = 0.0, 0, 0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has just ended
            cpu_s += sum(each.cpu_times()[:4])
            memory = each.memory_info()
            own_bytes += memory.rss - memory.shared
            shared_bytes = max(shared_bytes, memory.shared)
    return cpu_s, (own_bytes + shared_bytes) / 2**20


def megabytes(folder: Path) -> float:
    """Return the size of the files in a folder in MB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def exlm_program(name: str, recipe: str, text: Path, folder: Path, num_steps: int) -> Program:
    """Return `exlm pretrain` with a recipe."""
    values = {
        "data.train": f"[{text}]",
        "data.cache_dir": folder / "cache",
        "train.num_threads": 1,
        "train.max_steps": num_steps,
        "train.batch_sequences": SEQUENCES,
        "train.log_every_steps": 1,
    }
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "exlm_cli", "pretrain", "--recipe", recipe, "--seed", "1", *sets]
    run = folder / "run"
    return Program(
        name, [*command, "--device", "cpu", "--out", str(run)], folder, run / METRICS_FILE, b'"kind": "train"'
    )


def trainer_program(name: str, model_type: str, text: Path, folder: Path, num_steps: int) -> Program:
    """Return the script for the Trainer with a type of model."""
    values = {
        "text": text,
        "model_type": model_type,
        "tokenizer": folder / "cache" / "tokenizer.json",
        "output_dir": folder / "run",
        "max_steps": num_steps,
        "per_device_train_batch_size": SEQUENCES,
        "logging_steps": 1,
        "seed": 1,
    }
    command = [
        sys.executable,
        str(SCRIPT),
        *(word for key, value in values.items() for word in (f"--{key}", f"{value}")),
    ]
    return Program(name, command, folder, folder / "log.txt", b"'loss': ")


def write_text(source: Path | None, size_mb: float, target: Path) -> None:
    """Write the whole lines in the first megabytes of a text file, or sentences of the bundled grammar."""
    num_bytes = int(size_mb * 1e6)
    if source is None:
        text = "".join(f"{row}\n" for row in sample_sentences(num_bytes // 50, seed=0)).encode()
    else:
        with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as file:
            text = file.read(num_bytes)
    target.write_bytes(text[: text.rindex(b"\n") + 1])


def main() -> None:
    """Print a line for each program and append its row to `results/programs.csv`."""
    parser = argparse.ArgumentParser(description="exlm pretrain beside the Trainer of transformers, as whole programs")
    parser.add_argument("--text", type=Path, help="a text file, also .xz; none: the bundled grammar")
    parser.add_argument("--megabytes", default=15.0, type=float, help="so much of it")
    parser.add_argument("--steps", default=24, type=int)
    parser.add_argument("--quick", action="store_true", help="8 steps on 0.5 MB, no rows written")
    arguments = parser.parse_args()
    if importlib.util.find_spec("accelerate") is None:
        sys.exit("the Trainer of transformers needs accelerate: pip install accelerate")
    torch.set_num_threads(1)  # rows give the threads of the programs
    size_mb, num_steps = (0.5, 8) if arguments.quick else (arguments.megabytes, arguments.steps)
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "accelerate", "datasets")}
    if build.find_library("cpu") is None:  # a wheel brings it, a checkout builds it once
        build.build_library("cpu")
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(temporary, "text.txt")
        write_text(arguments.text, size_mb, text)
        for kind, name, model in (
            (exlm_program, "exlm MLM", "text-small-mlm"),
            (exlm_program, "exlm ExLM, k = 4", "text-small"),
            (trainer_program, "BERT, Trainer", "bert"),
            (trainer_program, "ModernBERT, Trainer", "modernbert"),
        ):
            folder = Path(temporary, model)
            (folder / "cache").mkdir(parents=True)
            row = kind(name, model, text, folder, num_steps).measure()
            speed = f"{row['tokens_per_cpu_s']:,} tokens per CPU second ({row['p20']:,} to {row['p80']:,})"
            disk = f"cache {row['cache_mb']} MB, run {row['run_mb']} MB"
            print(f"{name}, {row['parameters']:,} parameters: {speed}, {row['peak_mib']:,} MiB, {disk}", flush=True)
            if not arguments.quick:
                of_text = {"text": "bundled:grammar" if arguments.text is None else arguments.text.name, "mb": size_mb}
                harness.append_row("programs", row | of_text | versions | harness.surroundings(torch.device("cpu")))


if __name__ == "__main__":
    main()
