"""Benchmark of the alignment op: checks each backend against the float64 reference, then measures time and memory.

    python benchmarks/bench_alignment.py [--backends native] [--shapes 64x77x4,512x7x2] [--quick] [--device cuda]

A shape is B x T x k; S = k T + 2. (64, 77, 4) is the example of App. I and a batch of `text-base`, (512, 7, 2) a batch
of `smiles-base`; the others have more targets and more states. The reference is slow, so it runs on the first sequences
of a large batch only; if even one is beyond its limit, the comparison is with the host kernels in float64, which the
tests compare with a float64 loop. On a CUDA device the times are those of the device, and the processor time is what
the host needs to enqueue the call.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

import harness
from exlm_cli.ops.alignment import Backend, states_alignment_nll

SHAPES = "64x77x4,512x7x2,8x308x4,4x512x8"
HOLD_CYCLES = 50_000_000
REFERENCE_LIMIT = 1 << 29


class Shape(NamedTuple):
    """B sequences of T masks with k states each."""

    B: int
    T: int
    k: int

    @property
    def S(self) -> int:  # noqa: N802
        """DAG nodes."""
        return self.k * self.T + 2

    @property
    def num_cells(self) -> float:
        """Edges times targets, the size of the recursion."""
        return self.B * self.T * self.S**2 / 2


class Dag(NamedTuple):
    """Arguments of the op."""

    log_emit: Tensor
    log_trans: Tensor
    target_lengths: Tensor
    state_lengths: Tensor

    def first(self, num_sequences: int, dtype: torch.dtype) -> "Dag":
        """Return the first sequences, in another dtype."""
        part = [x[:num_sequences] for x in self]
        return Dag(part[0].to(dtype), part[1].to(dtype), *part[2:])


def make_dag(shape: Shape, device: torch.device) -> Dag:
    """Return emissions of std 3 and softmax transitions over all later states, float32, seeded."""
    generator = torch.Generator().manual_seed(0)
    B, T, _ = shape
    log_emit = torch.randn(B, T, shape.S, generator=generator) * 3 - 5
    log_trans = torch.randn(B, shape.S, shape.S, generator=generator)
    is_edge = torch.ones(shape.S, shape.S, dtype=torch.bool).triu(1)
    log_trans = log_trans.masked_fill_(~is_edge, -1e30).log_softmax(-1).masked_fill_(~is_edge, -torch.inf)
    dag = Dag(log_emit, log_trans, torch.full((B,), T), torch.full((B,), shape.S))
    return Dag(*(x.to(device) for x in dag))


def forward_backward(dag: Dag, backend: Backend, stopwatch: harness.Stopwatch | None = None) -> tuple[Tensor, ...]:
    """Return loss and both gradients; mark the start, the end of forward and the end of backward."""
    mark: Callable[[], None] = stopwatch.mark if stopwatch else lambda: None
    log_emit, log_trans = dag.log_emit.detach().requires_grad_(), dag.log_trans.detach().requires_grad_()
    if stopwatch and log_emit.device.type == "cuda":
        torch.cuda._sleep(HOLD_CYCLES)  # the host enqueues everything meanwhile, so the laps are of the device alone
    mark()
    nll = states_alignment_nll(log_emit, log_trans, *dag[2:], backend=backend)
    mark()
    gradients = torch.autograd.grad(nll.sum(), (log_emit, log_trans))
    mark()
    return nll.detach(), *gradients


def reference_sequences(shape: Shape) -> int:
    """Return for how many sequences the reference computes at most `REFERENCE_LIMIT` exponentials: for seconds."""
    return min(shape.B, REFERENCE_LIMIT // (shape.T * shape.S**2))


def assert_equal(dag: Dag, shape: Shape, backend: Backend) -> None:
    """Check that the loss is within 5e-6 (relative) and the gradients are within 5e-5 of float64.

    Gradients of the reference in float32 are not checked: it misses the bound itself (8.6e-5 at 8x308x4).
    """
    num_sequences = reference_sequences(shape)
    judge: Backend = "reference" if num_sequences else "native"
    expected = forward_backward(dag.first(num_sequences or 1, torch.float64), judge)
    actual = forward_backward(dag.first(num_sequences or 1, torch.float32), backend)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=5e-6, atol=1e-6)
    if backend == "reference":
        return
    for gradient, wanted in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=5e-5)


def prepare(shape: Shape, backend: Backend, device: torch.device) -> Callable[[], object]:
    """Return the call whose memory is measured, after a small call that loads the backend."""
    forward_backward(make_dag(Shape(1, 2, 2), device), backend)
    return functools.partial(forward_backward, make_dag(shape, device), backend)


def measure(shape: Shape, backend: Backend, device: torch.device, repeats: int) -> list[dict[str, object]]:
    """Return rows for forward, backward and both."""
    dag = make_dag(shape, device)
    assert_equal(dag, shape, backend)
    if backend == "reference":
        num_sequences = reference_sequences(shape)
        if not num_sequences:
            return []
        shape = shape._replace(B=num_sequences)
        dag = dag.first(num_sequences, torch.float32)
        repeats = min(repeats, 3)
    gradient_mib = (dag.log_emit.nbytes + dag.log_trans.nbytes) / 2**20
    extra_mib = harness.peak_mib(functools.partial(prepare, shape, backend, device), device) - gradient_mib
    laps: list[list[float]] = []
    processor_ms: list[float] = []
    for _ in range(1 + repeats):
        stopwatch = harness.Stopwatch(device)
        before_s = time.process_time()
        forward_backward(dag, backend, stopwatch)
        processor_ms.append(1000 * (time.process_time() - before_s))
        laps.append(stopwatch.laps_ms())
    rows: list[dict[str, object]] = []
    for name, times_ms in {
        "forward": [forward for forward, _ in laps[1:]],
        "backward": [backward for _, backward in laps[1:]],
        "both": [forward + backward for forward, backward in laps[1:]],
    }.items():
        spread = harness.Spread.of(times_ms)
        rows.append(
            {
                "op": "states_alignment",
                "backend": backend,
                "pass": name,
                "B": shape.B,
                "T": shape.T,
                "k": shape.k,
                "S": shape.S,
                "dtype": "float32",
                **spread.columns_ms(3),
                "ps_per_cell": round(spread.median * 1e9 / shape.num_cells, 2),
                # time of all threads; a busy machine changes it less than the wall clock
                "processor_ms": round(median(processor_ms[1:]), 3) if name == "both" else "",
                "extra_mib": round(extra_mib, 1) if name == "both" else "",
            }
        )
    return rows


def parse_shape(text: str) -> Shape:
    """Return the shape of a text such as `64x77x4`."""
    B, T, k = map(int, text.split("x"))
    return Shape(B, T, k)


def main() -> None:
    """Print a table and append its rows to `results/alignment.csv`."""
    parser = argparse.ArgumentParser(description="Benchmark of the alignment op")
    parser.add_argument("--backends", default="reference,native", help="comma-separated")
    parser.add_argument("--shapes", default=SHAPES, help="comma-separated BxTxk")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--threads", default=torch.get_num_threads(), type=int)
    parser.add_argument("--repeats", default=9, type=int, help="timed calls, after one warm-up call")
    parser.add_argument("--quick", action="store_true", help="three repeats, first two shapes, no rows written")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shapes = [parse_shape(text) for text in arguments.shapes.split(",")]
    if arguments.quick:
        arguments.repeats, shapes = 3, shapes[:2]
    names = ("median ms", "p20", "p80", "ps/cell", "x reference", "processor ms", "extra MiB")
    print("      B     T   k     S  backend    pass     " + "".join(f"{name:>14}" for name in names))
    for shape in shapes:
        reference_ps: dict[object, float] = {}
        for backend in arguments.backends.split(","):
            for row in measure(shape, backend, arguments.device, arguments.repeats):
                if backend == "reference":
                    reference_ps[row["pass"]] = float(str(row["ps_per_cell"]))
                times = reference_ps.get(row["pass"], math.nan) / float(str(row["ps_per_cell"]))
                print(f"{row['B']:>7}{row['T']:>6}{row['k']:>4}{row['S']:>6}  {backend:<11}{row['pass']:<9}", end="")
                values = [row[name] for name in ("median_ms", "p20_ms", "p80_ms", "ps_per_cell")]
                values += [round(times, 1), row["processor_ms"], row["extra_mib"]]
                print("".join(f"{value:>14}" for value in values), flush=True)
                if not arguments.quick:
                    harness.append_row("alignment", {**row, **harness.surroundings(arguments.device)})


if __name__ == "__main__":
    main()
