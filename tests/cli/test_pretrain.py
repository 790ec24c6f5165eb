"""`exlm pretrain`: a run directory that starts the same run again, results for people and programs, resumption."""

import resource
from pathlib import Path

from exlm_cli.cli.app import main
from exlm_cli.config.load import load_recipe
from exlm_cli.cost.gpus import GPUS
from exlm_cli.cost.meter import Meter
from exlm_cli.run_dir import read_metrics, read_run_json
from exlm_cli.train import loop
from exlm_cli.train.checkpoint import verify_checkpoint
from tests.cli.asserts import printed_by, refusal_of, result_of


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "step-4" / "model.safetensors").read_bytes()


def test_a_run_on_local_files_starts_again_from_what_it_leaves_and_resumes_from_any_folder(
    folder, tiny, monkeypatch, capsys
):
    (folder / "rows.txt").write_text("".join(f"row {n} of many\n" for n in range(200)))
    words = ["pretrain", "--recipe", "quickstart-text", *tiny, "--seed", "3", "--device", "cpu"]
    result = result_of(capsys, *words, "--set", "data.train=rows.txt", "--out", "run")
    assert (result["run_dir"], result["steps"]) == ("run", 4)
    assert Path(result["checkpoint"]) == Path("run/checkpoints/step-4")
    assert {"loss", "perplexity", "mask_accuracy"} <= set(result["metrics"])
    run = folder / "run"
    recipe = load_recipe("run/recipe.yaml")
    assert (recipe.name, recipe.seed, recipe.device) == ("quickstart-text", 3, "cpu")
    described = read_run_json(run)
    assert (described.command, described.seed) == ("pretrain", 3)
    assert described.data_fingerprint
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 4
    before = weights(run)
    monkeypatch.chdir(folder.parent)
    assert main(["pretrain", "--recipe", "work/run/recipe.yaml", "--out", "again"]) == 0
    assert weights(folder.parent / "again") == before
    # a finished run that is resumed stays as it is; the figures of its last validation are in its checkpoint
    capsys.readouterr()
    (run / "metrics.jsonl").unlink()
    again = result_of(capsys, "pretrain", "--resume", run)
    assert (again["metrics"], again["steps"], weights(run)) == (result["metrics"], 4, before)


class OnH100(Meter):
    """Takes this machine for a GPU."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gpu = GPUS["h100"]


def test_a_mlm_run_on_smiles_is_told_in_words_with_the_share_of_a_gpu_s_peak(folder, tiny, monkeypatch, capsys):
    monkeypatch.setattr(loop, "Meter", OnH100)
    words = ["pretrain", "--recipe", "quickstart-smiles-mlm", *tiny, "--out", "run", "--profile", "2"]
    captured = printed_by(capsys, words)
    lines = captured.out.splitlines()
    told = {line.partition("  ")[0]: line for line in lines}
    assert {"run", "steps", "loss", "time", "peak memory"} <= told.keys()
    assert "token frequencies" in told["loss"]
    assert "DAG" not in told
    assert told["utilisation"].endswith(" of the 989 TFLOP/s of the H100 SXM, 80 GB")
    assert "learned: nothing yet" in captured.out
    assert "no step is traced" in captured.err
    # copying this run's recipe and training longer is all that helps
    assert lines[-1] == "next: exlm pretrain --recipe run/recipe.yaml --set train.max_steps=40"


def test_a_disk_that_fills_up_under_a_checkpoint_leaves_none_and_the_run_can_be_continued(folder, tiny, capsys):
    """The file system really refuses: no file of this process may grow beyond 60 kB, which a checkpoint does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        error = refusal_of(capsys, "pretrain", "--recipe", "quickstart-text", *tiny, "--out", "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.startswith("error: run/checkpoints/step-2: ")
    assert "File too large" in error
    assert list((folder / "run" / "checkpoints").iterdir()) == []
    before = (folder / "run" / "recipe.yaml").read_bytes()
    assert main(["pretrain", "--resume", "run"]) == 0
    assert verify_checkpoint(folder / "run" / "checkpoints" / "step-4") is None
    # and not with another recipe
    assert main(["pretrain", "--resume", "run", "--set", "optim.lr=0.5"]) == 2
    assert (folder / "run" / "recipe.yaml").read_bytes() == before
