"""`exlm tokenize`: a tokenizer and token shards from files, without a model."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import DryRunOption, JsonOption, RecipeOption, SetOption, collect_overrides
from exlm_cli.errors import ConfigError


class Kind(StrEnum):
    """What a row of the inputs is."""

    text = "text"
    smiles = "smiles"


_RECIPE_OF_KIND = {Kind.text: "text-small", Kind.smiles: "smiles-small"}


def tokenize(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUTS", help="Files, directories, globs or hub:NAME; instead of the recipe's."),
    ] = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    kind: Annotated[
        Kind | None, typer.Option("--kind", help="Of INPUTS without a recipe: text-small or smiles-small is taken.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", metavar="N", help="Size of the tokenizer.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="Take this tokenizer.json instead of training.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where shards go; default: the user's cache directory.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train or take a tokenizer and write token shards.

    A second run, and `exlm pretrain` with the same inputs and options, finds them and starts at once.
    """
    from exlm_cli.cli import console
    from exlm_cli.config.load import dump_recipe, load_recipe

    if recipe is None and (kind is None or not inputs):
        raise ConfigError(
            "give `--recipe`, or INPUTS with `--kind text` or `--kind smiles`",
            "for example `exlm tokenize corpus/*.txt --kind text --vocab-size 8192 --out tokens`",
        )
    if recipe is not None and kind is not None:
        raise ConfigError("`--kind` does not go with `--recipe`", "the recipe's `data.kind` says it")
    overrides = collect_overrides(sets)
    if inputs:
        overrides.append(f"data.train={json.dumps(inputs, ensure_ascii=False)}")
    if vocab_size is not None:
        overrides.append(f"tokenizer.vocab_size={vocab_size}")
    if tokenizer is not None:
        overrides.append(f"tokenizer.path={json.dumps(str(tokenizer), ensure_ascii=False)}")
    if out is not None:
        overrides.append(f"data.cache_dir={json.dumps(str(out), ensure_ascii=False)}")
    if recipe is None:
        assert kind is not None, "checked above"
        recipe = _RECIPE_OF_KIND[kind]
    resolved = load_recipe(recipe, overrides)
    if dry_run:
        return console.emit_text(dump_recipe(resolved))
    progress = console.open_progress()
    from exlm_cli.data.prepare import prepare_data

    rejected_csv = (out or Path()) / "rejected.csv"
    data = prepare_data(resolved, rejected_csv=rejected_csv, progress=progress)
    result = {
        "fingerprint": data.fingerprint,
        "vocab_size": data.tokenizer.vocab_size,
        "train_sequences": len(data.train),
        "train_tokens": data.train.num_tokens,
        "valid_sequences": len(data.valid),
        "valid_tokens": data.valid.num_tokens,
        "num_rejected": data.num_rejected,
        "was_cached": data.was_cached,
    }
    if as_json:
        return console.emit_json(result)
    console.emit_pairs(
        {
            name.replace("_", " "): f"{value:,}" if isinstance(value, int) else str(value)
            for name, value in result.items()
        }
    )
