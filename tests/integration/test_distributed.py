"""Several ranks train what one process trains: the same losses and weights but for rounding, killed or not.

Dropout is off, since its streams differ by rank. The one-process run is the reference; it is tested elsewhere.
"""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.data.sampler import plan_epoch
from exlm_cli.distributed import shared_run
from exlm_cli.errors import DataError
from exlm_cli.files import hash_json
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics, read_run_json
from exlm_cli.train.checkpoint import verify_checkpoint
from exlm_cli.train.optim import LossScale
from exlm_cli.train.pretrain import resume_pretraining, run_pretraining
from exlm_cli.train.pretrain_task import PretrainTask
from exlm_cli.train.pretrained import load_pretrained
from tests.killed import act_at_call, die_at_call
from tests.ranks import in_turn, note_error, noted_errors, own_rank, run_ranks
from tests.tiny import CHAIN, tiny_recipe

STEPS = 16
LOSS_BOUND, WEIGHT_BOUND = 5e-6, 5e-5


# number of ranks, kind of data, objective: every pair of values of two columns is in some row; settings
CASES = [
    (2, "text", "exlm", {}),
    (2, "smiles", "mlm", {"gradient_checkpointing": True}),
    (3, "smiles", "exlm", {"gradient_checkpointing": True}),
    (3, "text", "mlm", {}),
    (2, "text", "chain", {}),
]


def recipe_of(cache, kind, objective, **train):
    """Return a recipe of 16 steps in two epochs, with microbatches of a few sequences."""
    data = {
        "text": {"train": ["bundled:grammar"], "bundled_rows": 44},
        "smiles": {"train": ["bundled:molecules"], "bundled_rows": 45},
    }
    masking = {"num_states_per_mask": 1 if objective == "mlm" else 3}
    if (kind, objective) == ("smiles", "exlm"):
        masking["mask_ratio"] = (0.1, 0.6)
    return tiny_recipe(
        objective="mlm" if objective == "mlm" else "exlm",
        data={"kind": kind, "on_invalid": "skip", "cache_dir": str(cache), "sequence_length": 40, **data[kind]},
        masking=masking,
        model={**(CHAIN if objective == "chain" else {}), "dropout": 0.0, "attention_dropout": 0.0, "max_length": 128},
        train={
            "max_steps": STEPS, "batch_sequences": 6, "microbatch_tokens": 200, "checkpoint_every_steps": 6,
            "validate_every_steps": 6, "log_every_steps": 1, "validation_sequences": 2, "num_threads": 1, **train,
        },
    )  # fmt: skip


def weights_of(run):
    """Return the weights at the end of a run."""
    checkpoint = run / f"checkpoints/step-{STEPS}"
    assert verify_checkpoint(checkpoint) is None
    return load_file(checkpoint / "model.safetensors")


def assert_same(mine, theirs):
    """Compare each row of metrics, and the weights, tensor by tensor."""
    rows, expected_rows = (read_metrics(run / "metrics.jsonl") for run in (mine, theirs))
    assert [row["step"] for row in rows] == [row["step"] for row in expected_rows]
    assert sum(row["kind"] == "train" for row in rows) == STEPS
    for row, expected in zip(rows, expected_rows, strict=True):
        assert math.isclose(row["loss"], expected["loss"], rel_tol=LOSS_BOUND), row["step"]
        assert row.get("num_infeasible") == expected.get("num_infeasible")
        assert row.get("mask_accuracy") == pytest.approx(expected.get("mask_accuracy"))
    weights, expected_weights = weights_of(mine), weights_of(theirs)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        assert_close(tensor, expected_weights[name], name, lr=1e-3, invariant=["transition.key.bias"])


def assert_close(tensor, expected, name, *, lr, invariant):
    """Compare a tensor with that of one process, relative to its norm.

    A bias that adds the same to all entries of a softmax is `invariant`: its gradient is zero, and what AdamW moves it
    by is rounding, without a digit in common. It must stay below a tenth of what one step moves an entry with a
    gradient, which is about the learning rate.
    """
    if name in invariant:
        assert max(float(t.abs().max()) for t in (tensor, expected)) < 0.1 * lr, name
    else:
        assert float((tensor.double() - expected.double()).norm()) <= WEIGHT_BOUND * float(expected.double().norm()), (
            name
        )


def train(recipe, out):
    run_pretraining(recipe, out=out)


def train_until_killed(recipe, out, notes, dying, call):
    """Let one rank kill itself in a forward pass; the others note why they end."""
    if own_rank() == dying:
        die_at_call(PretrainTask, "losses", call)
    note_error(notes, lambda: run_pretraining(recipe, out=out))


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """Runs of one process, by kind and objective."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {(kind, objective): folder / f"{kind}-{objective}" for _, kind, objective, _ in CASES}
    in_turn(train, [(recipe_of(cache, *key), out) for key, out in runs.items()])
    return runs


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_what_one_process_trains(cache, alone, tmp_path, size):
    cases = [
        (tmp_path / f"{kind}-{objective}", kind, objective, train)
        for count, kind, objective, train in CASES
        if count == size
    ]
    calls = [(recipe_of(cache, kind, objective, **train), out) for out, kind, objective, train in cases]
    assert run_ranks(size, in_turn, train, calls) == [0] * size
    for out, kind, objective, _ in cases:
        assert_same(out, alone[kind, objective])
        assert read_run_json(out).num_ranks == size
        assert load_pretrained(out, device="cpu").step == STEPS


def test_the_last_step_of_an_epoch_has_fewer_sequences_than_ranks(cache):
    """So the runs above have a rank with nothing to do in that step."""
    for kind in ("text", "smiles"):
        recipe = recipe_of(cache, kind, "exlm")
        data = prepare_data(recipe, progress=SilentProgress())
        plan = plan_epoch(data.train.lengths, seed=1, epoch=0, batch_sequences=6, batch_tokens=None, bucket_steps=16)
        assert len(plan) < STEPS
        assert len(plan[-1]) < 2


@pytest.mark.parametrize(("before", "after", "dying", "call"), [(2, 3, 1, 14), (3, 1, 0, 11)])
def test_one_survivor_of_a_killed_rank_reports_it_and_another_number_of_ranks_goes_on(
    cache, alone, tmp_path, before, after, dying, call
):
    out, recipe = tmp_path / "run", recipe_of(cache, "text", "exlm")
    exit_codes = run_ranks(before, train_until_killed, recipe, out, tmp_path, dying, call)
    assert exit_codes == [-9 if rank == dying else 0 for rank in range(before)]
    errors = noted_errors(tmp_path)
    assert errors.keys() == set(range(before)) - {dying}
    for error in errors.values():
        assert error["type"] == "RankError"
        assert error["message"].startswith("another rank does not answer: it was killed")
        assert "--resume" in error["hint"]
    (reporter,) = {error["by"] for error in errors.values()}
    assert reporter in errors
    assert run_ranks(after, resume_pretraining, out) == [0] * after
    assert_same(out, alone["text", "exlm"])


def train_until_signalled(recipe, out, notes):
    """Let a signal come to rank 1 alone, in a forward pass; every rank notes why it ends."""
    if own_rank() == 1:
        act_at_call(PretrainTask, "losses", 14, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    note_error(notes, lambda: run_pretraining(recipe, out=out))


def test_a_signal_to_one_rank_stops_all_after_the_same_step(cache, alone, tmp_path):
    out = tmp_path / "run"
    assert run_ranks(2, train_until_signalled, recipe_of(cache, "text", "exlm"), out, tmp_path) == [0, 0]
    first, second = noted_errors(tmp_path).values()
    assert first == second
    assert first["type"] == "InterruptedRunError"
    step = max(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir())
    checkpoint = out / f"checkpoints/step-{step}"
    assert first["message"] == f"stopped at step {step} of {STEPS}; the checkpoint is {checkpoint}"
    resume_pretraining(out)
    assert_same(out, alone["text", "exlm"])


LOST, LOST_STEP = 1, 5
"""The rank whose gradients overflow, and the step, counted from 1."""


def train_in_fp16(recipe, out, notes):
    """Train; gradients overflow in one step, on one rank alone. Note the weights before each step, and the scales."""
    scales = []
    weights = []
    update, losses, begin_step = LossScale.update, PretrainTask.losses, PretrainTask.begin_step

    def noting(self, is_finite):
        update(self, is_finite)
        scales.append(float(self.value))

    def overflowing(self, batch):
        is_lost = own_rank() == LOST and len(scales) == LOST_STEP - 1
        return losses(self, batch) * (1e30 if is_lost else 1.0)

    def begin(self, share_done):
        begin_step(self, share_done)
        weights.append(hash_json([parameter.tolist() for parameter in self.model.parameters()]))

    LossScale.update, PretrainTask.losses, PretrainTask.begin_step = noting, overflowing, begin
    run_pretraining(recipe, out=out)
    (notes / f"noted-{own_rank()}.json").write_text(json.dumps([weights, scales]))


def test_three_ranks_in_fp16_skip_the_step_that_overflows_on_one_of_them(cache, tmp_path):
    recipe = recipe_of(cache, "text", "exlm", precision="fp16")
    assert run_ranks(3, train_in_fp16, recipe, tmp_path / "run", tmp_path) == [0, 0, 0]
    first, *others = [json.loads((tmp_path / f"noted-{rank}.json").read_text()) for rank in range(3)]
    assert others == [first, first]
    weights, scales = first
    assert weights[LOST_STEP - 1] == weights[LOST_STEP] != weights[-1]
    factors = [scale / LossScale.START for scale in scales]
    assert factors == [1] * (LOST_STEP - 1) + [1 / 2] * (STEPS - LOST_STEP + 1)
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if row["kind"] == "train"]
    assert [row["num_overflows"] for row in rows] == [0] * (LOST_STEP - 1) + [1] * (STEPS - LOST_STEP + 1)


def fail(*_):
    raise DataError("row 7 cannot be read", "mend it")


def train_until_refused(recipe, out, notes):
    """Let rank 1 of several make a user's mistake in a forward pass, where the others do not."""
    if own_rank() == 1:
        act_at_call(PretrainTask, "losses", 5, fail)
    note_error(notes, lambda: run_pretraining(recipe, out=out))


def test_a_users_error_on_one_rank_ends_all_with_it(cache, tmp_path):
    assert run_ranks(3, train_until_refused, recipe_of(cache, "text", "exlm"), tmp_path / "run", tmp_path) == [0, 0, 0]
    errors = noted_errors(tmp_path)
    assert [errors[rank]["type"] for rank in range(3)] == ["RankError", "DataError", "RankError"]
    said = ["rank 1: row 7 cannot be read", "row 7 cannot be read", "rank 1: row 7 cannot be read"]
    assert [errors[rank]["message"] for rank in range(3)] == said
    assert {(error["hint"], error["by"]) for error in errors.values()} == {("mend it", 0)}


class _OtherDisk(type(Path())):
    """Paths of a disk that does not have the files of rank 0."""

    def is_file(self):
        return False


def train_refused(cache, folder, mistake):
    """Make a mistake on rank 1 and note what each rank says."""
    is_second = own_rank() == 1
    max_steps, batch_sequences = 3 if mistake == "recipe" and is_second else 2, 1 if mistake == "small batch" else 6
    recipe = recipe_of(cache, "text", "exlm", max_steps=max_steps, batch_sequences=batch_sequences)
    # what rank 0 has made is not on this rank's disk
    shared_run.Path = _OtherDisk if mistake == "disk" and is_second else Path
    if mistake in ("data", "tokenised before"):
        own = folder / f"of-{own_rank()}"
        own.mkdir()
        (own / "rows.txt").write_text("".join(f"row {i} of {own_rank()}\n" for i in range(200)))
        os.chdir(own)
        data = recipe.data.model_copy(update={"train": ("rows.txt",)})
        recipe = recipe.model_copy(update={"data": data})
        if mistake == "tokenised before" and is_second:
            # so that the cache holds the other data too
            prepare_data(recipe, progress=SilentProgress())
    note_error(folder, lambda: run_pretraining(recipe, out=folder / "run"))


MISTAKES = {
    "recipe": ("ConfigError", "rank 1 and rank 0 were given different recipes; they differ in `train.max_steps`"),
    "small batch": ("ConfigError", "a step has at most 1 sequences, fewer than the 2 ranks"),
    "disk": ("RankError", "rank 1 does not see the run directory that rank 0 made"),
    "data": ("RankError", "this rank and rank 0 read different data, or have different caches"),
    "tokenised before": ("ConfigError", "rank 1 and rank 0 read different data under the same names"),
}
"""Type of the error on rank 0, which prints it, and what both ranks say."""


def test_a_wrong_launch_is_one_error_and_not_a_hang(cache, tmp_path):
    """Both ranks end with it, rank 0 prints it, and no run directory is left; the processes go on with the next."""
    for mistake in MISTAKES:
        (tmp_path / mistake).mkdir()
    assert run_ranks(2, in_turn, train_refused, [(cache, tmp_path / m, m) for m in MISTAKES]) == [0, 0]
    for mistake, (kind, sentence) in MISTAKES.items():
        errors = noted_errors(tmp_path / mistake)
        assert errors[0]["type"] == kind, mistake
        for rank in (0, 1):
            assert sentence in errors[rank]["message"], mistake
            assert errors[rank]["hint"], mistake
            assert errors[rank]["by"] == 0, mistake
        assert not (tmp_path / mistake / "run").exists(), mistake


def test_torchrun_prints_once(cache, tmp_path):
    """The command as users launch it: results once on stdout, messages once on stderr."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "exlm_cli"]
    settings = [
        "train.max_steps=3", "train.validation_sequences=4", "train.batch_sequences=4", "optim.warmup_steps=0",
        "model.width=32", "model.ffn_width=16", "model.num_layers=1", "data.bundled_rows=300",
        f"data.cache_dir={cache}",
    ]  # fmt: skip
    words = ["pretrain", "--recipe", "quickstart-text", "--device", "cpu", "--out", "run"]
    words += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run([*launch, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\ncheckpoint ") == 1
    assert done.stderr.count("2 ranks; results in run") == 1
    assert "Warning" not in done.stderr
