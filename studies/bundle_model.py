"""A trained run as a model of the package: weights rounded to float16, recipe, tokenizer, and a card.

`python studies/bundle_model.py RUN studies/bundled/smiles.yaml --valid valid.txt.xz` writes
`src/exlm_cli/pretrained/smiles/`, in place of the one that is there. The YAML file has the sentences of the card; all
numbers come from the run, and the losses before and after rounding from the validation files.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
import yaml

from exlm_cli import bundled_models
from exlm_cli.cli.console import open_progress
from exlm_cli.config.base import StrictModel
from exlm_cli.cost.meter import num_parameters
from exlm_cli.errors import ExlmError
from exlm_cli.experiments.evaluate import evaluate_pretrained
from exlm_cli.export.hub import copy_run
from exlm_cli.export.source import Source, pretrained_source
from exlm_cli.files import folder_for_results, write_json
from exlm_cli.format import format_bytes, format_count, format_large, format_number, format_parameters
from exlm_cli.progress import Progress
from exlm_cli.run_dir import METRICS_FILE, RUN_FILE, MetricsLog, read_run_json
from exlm_cli.train.checkpoint import MODEL_FILE, checkpoint_paths, read_manifest
from exlm_cli.train.pretrained import load_pretrained

MAX_BYTES = 26_000_000
"""Of all models in the package together; a test holds it."""
MOST_LOST = 0.005
"""Nats by which rounding may raise the loss."""


ROUNDING_FILE = "rounding.json"
"""Figures before and after rounding, which `benchmarks/quarter_hour.py` writes."""


class About(StrictModel):
    """Sentences of a model card that no run knows.

    Attributes:
        trained_on: The data in a few words, as commands name them.
        sources: Where the data are from, and their terms.
        hardware, hours, commit: Where run.json does not say them, or not all of it.
        began_with: The weights that the run began with, where it has not begun from nothing.
        good_at, bad_at: What the model is good and bad at.
        command: The training command, and how to get its data.
    """

    name: Literal["smiles", "text"]
    title: str
    trained_on: str
    sources: tuple[str, ...]
    hardware: str | None = None
    hours: float | None = None
    commit: str | None = None
    began_with: str | None = None
    good_at: tuple[str, ...]
    bad_at: tuple[str, ...]
    command: str


def bundle(
    run: Path,
    about: About,
    *,
    valid: Sequence[str],
    max_sequences: int | None,
    folder: Path,
    progress: Progress,
) -> Path:
    """Write `folder/NAME/` and return it.

    Args:
        run: Run directory of `exlm pretrain`, or one of its checkpoints.
        about: Sentences of the card, and the name.
        valid: Validation files, on which the loss is measured before and after rounding; none where the run has both.
        max_sequences: Sequences of them that are scored; None: all.
        folder: Where the models of the package are.
        progress: Reports the work.

    Raises:
        ExlmError: The run or a file cannot be used, or rounding costs too much.
    """
    source = pretrained_source(load_pretrained(run, device="cpu", progress=progress))
    with folder_for_results(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        new = Path(scratch) / about.name
        copy_run(source, new, torch.float16)
        parameters = num_parameters(source.model)
        said = {"trained_on": about.trained_on, "parameters": parameters}
        write_json(new / RUN_FILE, read_run_json(new).model_copy(update=said))
        before, after, on = _figures(source, new, valid, max_sequences, progress)
        # the newest validation, which an exported card tells, is of these weights
        MetricsLog(new / METRICS_FILE).append({"kind": "valid", "step": source.num_steps, **after})
        lost = after["loss"] - before["loss"]
        if not lost <= MOST_LOST:
            raise ExlmError(f"{run}: rounding to float16 costs {lost:.4f} nats", "ship another checkpoint")
        (new / "README.md").write_text(model_card(source, about, new, before, after, on), encoding="utf-8")
        others = [path for path in folder.glob("*") if path.name != about.name and not path.name.startswith(".")]
        total = sum(map(size_of, [new, *others]))
        shutil.rmtree(folder / about.name, ignore_errors=True)
        new.rename(folder / about.name)
    progress.message(f"{folder / about.name}: rounding costs {lost:.5f} nats; all models have {format_bytes(total)}")
    return folder / about.name


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _figures(
    source: Source, rounded: Path, valid: Sequence[str], max_sequences: int | None, progress: Progress
) -> tuple[Mapping[str, float], Mapping[str, float], str]:
    """Return validation figures before and after rounding, and the data that they are of.

    A run that `benchmarks/quarter_hour.py` brought back has rounded weights already, and both figures in a file.
    """
    measured = source.run / ROUNDING_FILE
    if measured.is_file():
        found = json.loads(measured.read_text(encoding="utf-8"))
        return found["trained"], found["float16"], "the validation sequences of the training"
    if not valid:
        raise ExlmError(f"{source.run}: no figures of the weights before rounding", "give files with `--valid FILE`")
    before, after = (
        evaluate_pretrained(
            path,
            path.name,
            valid=valid,
            overrides=["data.on_invalid=skip"],  # molecules that are longer than the model's sequences
            max_sequences=max_sequences,
            progress=progress,
        )
        for path in (source.weights[0], rounded)
    )
    sequences = after.data.partition(" of ")[0]
    return before.metrics, after.metrics, f"{sequences} of {', '.join(Path(given).name for given in valid)}"


def model_card(
    source: Source, about: About, folder: Path, before: Mapping[str, float], after: Mapping[str, float], on: str
) -> str:
    """Return the content of the card; `folder` holds everything else of the model, and the figures are of data `on`."""
    info, recipe = read_run_json(folder), source.recipe
    hours = about.hours or (info.train_time_s or 0.0) / 3600
    sequences = "" if info.train_sequences is None else f"; {format_count(info.train_sequences)} sequences"
    tokens = "" if info.train_tokens is None else f", {format_large(info.train_tokens)} tokens in one pass"
    (checkpoint,) = checkpoint_paths(folder)
    rows = {
        "data": f"{about.trained_on}{sequences}{tokens}",
        "recipe": f"`{recipe.name}`, {recipe.objective}, {recipe.masking.num_states_per_mask} states of a [MASK], "
        f"mask ratio {_masked(recipe.masking.mask_ratio)}",
        **({} if about.began_with is None else {"began with": about.began_with}),
        "parameters": format_parameters(info.parameters or 0),
        "input tokens of the training": format_large(source.num_tokens),
        "steps": format_count(source.num_steps),
        "hours": f"{hours:.2f}",
        "hardware": about.hardware or info.device,
        "commit": f"`{about.commit or info.git_commit}`",
        "seed": info.seed,
        "precision": f"trained in {info.precision}; weights rounded to float16 here, and read as float32",
        "SHA-256 of the weights": f"`{read_manifest(checkpoint).files[MODEL_FILE].sha256}`",
    }
    shown = {"loss, nats a target": "loss", "perplexity": "perplexity", "accuracy on masked tokens": "mask_accuracy"}
    scores = [
        f"| {label} | {format_number(before[key])} | {format_number(after[key])} |"
        for label, key in shown.items()
        if key in after
    ]
    example = '"CC[MASK]c1cc[MASK]cc1"' if about.name == "smiles" else '"This is [MASK], and I\'m very [MASK]."'
    parts = [
        f"# {about.title}",
        f"`exlm inspect-dag {example} --checkpoint bundled:{about.name}`, or in Python "
        f'`exlm_cli.load("bundled:{about.name}")`. Method: ExLM (arXiv 2501.13397).',
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]),
        "## Scores\n\n" + f"On {on}, before and after rounding:",
        "\n".join(["| | float32 | float16 |", "|---|---|---|", *scores]),
        *(
            f"## {heading}\n\n{_listed(lines)}"
            for heading, lines in (
                ("Data and their terms", about.sources),
                ("Good at", about.good_at),
                ("Bad at", about.bad_at),
            )
        ),
        f"## Training\n\n```sh\n{about.command.strip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _masked(ratio: float | tuple[float, float]) -> str:
    return " to ".join(f"{share:g}" for share in (ratio if isinstance(ratio, tuple) else (ratio,)))


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def main() -> None:
    """Read the words of the command line and bundle a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("about", type=Path, metavar="YAML", help="sentences of the card")
    parser.add_argument("--valid", nargs="*", default=[], metavar="FILE", help="validation files")
    parser.add_argument("--max-sequences", type=int, metavar="N", help="sequences scored; default: all")
    parser.add_argument("--folder", type=Path, default=bundled_models.FOLDER, help="default: src/exlm_cli/pretrained")
    given = parser.parse_args()
    about = About.model_validate(yaml.safe_load(given.about.read_text(encoding="utf-8")))
    try:
        bundle(
            given.run,
            about,
            valid=given.valid,
            max_sequences=given.max_sequences,
            folder=given.folder,
            progress=open_progress(),
        )
    except ExlmError as error:
        raise SystemExit(f"error: {error.message}\n\nhint: {error.hint}") from error


if __name__ == "__main__":
    main()
