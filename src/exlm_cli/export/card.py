"""Model card of an exported folder: recipe, data, budget, scores, licence, caveats, and how to use it."""

import re
from pathlib import Path
from typing import Literal

from exlm_cli.export.source import Source
from exlm_cli.finetune.results import RunResults
from exlm_cli.format import describe_ratio
from exlm_cli.run_dir import read_run_json

Format = Literal["hf", "onnx"]
_TASKS = {
    "Model": "feature-extraction",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}
"""Tag of the Hub by the end of the name of a class."""


def model_card(
    source: Source, difference: float, *, form: Format = "hf", licence: str | None = None, repo: str | None = None
) -> str:
    """Return the content of `README.md`, from `export/templates/card.md`.

    Args:
        source: The model.
        difference: The largest one from the outputs of the run.
        form: Format of the folder.
        licence: As the Hub names it; None: that of the source, if any.
        repo: OWNER/NAME on the Hub; None: a folder.
    """
    from huggingface_hub import ModelCardData
    from jinja2 import Environment, PackageLoader, StrictUndefined

    licence = licence or source.licence
    environment = Environment(  # noqa: S701 (Markdown, not HTML)
        loader=PackageLoader("exlm_cli.export"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    metadata = ModelCardData(
        license=licence,
        library_name="onnx" if form == "onnx" else "transformers",
        pipeline_tag=next(tag for end, tag in _TASKS.items() if source.class_name.endswith(end)),
        tags=["exlm", source.family, source.recipe.data.kind],
    )
    on_task = "" if source.results is None else f", {_trained_on(source.results, source.table)}"
    texts = [repr(text) for text in source.texts()[0]]
    if source.has_canonical_smiles:
        texts = [f"canonical({text})" for text in texts]
    notes = () if source.results is None else source.results.notes
    return environment.get_template("card.md").render(
        source=source,
        is_onnx=form == "onnx",
        metadata=metadata.to_yaml(),
        title=f"{source.recipe.name}{on_task}",
        summary=_summary(source),
        folder=repo or "FOLDER",
        masked_text=repr(source.masked_text),
        batch_of_one=", ".join(f"[{text}]" for text in texts),
        repo=repo,
        table=_table,
        training=_training(source),
        scores={name: f"{value:.4g}" for name, value in source.scores.items()},
        notes=[note for note in notes if _is_of_seed(note, source.seed)],
        licence=licence,
        difference=difference,
    )


def _summary(source: Source) -> str:
    what = "SMILES" if source.recipe.data.kind == "smiles" else "text"
    model = "ExLM" if source.recipe.objective == "exlm" else "masked language model (MLM)"
    if source.results is None:
        done = f"Pre-trained {model} of {what}."
    else:
        done = f"{model} of {what}, {_trained_on(source.results, source.table)} (loss: {source.results.loss})."
    return done[0].upper() + done[1:]


def _trained_on(results: RunResults, table: str | None) -> str:
    how = "trained from random weights" if results.init.objective == "scratch" else "fine-tuned"
    return f"{how} on {_data(results, table)}"


def _data(results: RunResults, table: str | None) -> str:
    return results.task if table is None else _data_name(table)


def _training(source: Source) -> dict[str, object]:
    recipe, info = source.recipe, read_run_json(source.run)
    model, masking, train = recipe.model, recipe.masking, recipe.train
    batch = f"{train.batch_sequences} sequences" if train.batch_sequences else f"{train.batch_tokens} tokens"
    results = source.results
    budget = f"{source.num_steps:,} steps, {source.num_tokens:,} input tokens"
    before: dict[str, object] = {
        "recipe of pre-training": recipe.name,
        "data of pre-training": info.trained_on or ", ".join(map(_data_name, recipe.data.train)),
        "budget of pre-training": budget,
    }
    if results is not None and results.init.objective == "scratch":
        before = {"recipe of the encoder": recipe.name, "pre-training": "none"}
    rows: dict[str, object] = {
        **before,
        "encoder": f"layers {model.num_layers}, width {model.width}, heads {model.num_heads}, positions `{model.rope}`",
        "objective": f"{recipe.objective}, mask ratio {describe_ratio(masking.mask_ratio)}",
        "states of a mask": masking.num_states_per_mask,
        "optimiser": f"AdamW, learning rate {recipe.optim.lr:g}, {batch} a step",
        "longest sequence": f"{source.sequence_length} tokens",
    }
    if results is not None:
        sizes = ", ".join(f"{size:,} {split}" for split, size in results.split_sizes.items())
        rows["fine-tuning"] = (
            f"{results.recipe} on {_data(results, source.table)}; rows: {sizes}; split: {results.split}"
        )
        rows["seed"] = f"{source.seed}, the best in validation of {', '.join(map(str, results.seeds))}"
    commit = f", commit {info.git_commit}" if info.git_commit else ""
    rows["versions"] = f"exlm {info.exlm_version}, torch {info.torch_version}{commit}"
    return rows


def _data_name(given: str) -> str:
    """Return an input without the folders of the machine that it was read on."""
    return f"`{given}`" if given.startswith(("hub:", "bundled:")) else f"`{Path(given).name}`"


def _is_of_seed(note: str, seed: int | None) -> bool:
    """Return whether a note of a run is about a seed, or about no seed in particular."""
    named = re.search(r" \(seeds? ([\d, ]+)\)$", note)
    return named is None or str(seed) in named[1].split(", ")


def _table(rows: dict[str, object] | dict[str, str]) -> str:
    cells = {name: str(value).replace("|", r"\|") for name, value in rows.items()}
    lines = [f"| {name} | {value} |" for name, value in cells.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
