"""`exlm tokenize`: a tokenizer and token shards, without a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exlm_cli.cli.options import (
    DryRunOption,
    JsonOption,
    OnInvalidOption,
    OutOption,
    RecipeOption,
    SetOption,
    collect_overrides,
    refuse_together,
)
from exlm_cli.errors import ConfigError
from exlm_cli.paths import expand_path
from exlm_cli.run_dir import create_run_dir, sole_process

if TYPE_CHECKING:
    from exlm_cli.config.pretrain import PretrainRecipe


Kind = Literal["text", "smiles"]
"""What a row of the inputs is."""

InputsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="INPUTS", help="Files, directories, globs or hub:NAME, instead of the recipe's."),
]
KindOption = Annotated[
    Kind | None, typer.Option("--kind", help="Kind of INPUTS; uses the recipe text-small or smiles-small.")
]
VocabSizeOption = Annotated[int | None, typer.Option("--vocab-size", metavar="N", help="Size of the tokenizer.")]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", metavar="FILE", parser=expand_path, help="Use this tokenizer.json instead of training one."
    ),
]


def tokenize(
    inputs: InputsArgument = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    kind: KindOption = None,
    vocab_size: VocabSizeOption = None,
    tokenizer: TokenizerOption = None,
    out: OutOption = None,
    on_invalid: OnInvalidOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train or load a tokenizer and write token shards.

    Shards are kept in the cache: a second run, and `exlm pretrain` with the same inputs and options, start at once.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import emit_dry_run
    from exlm_cli.config.load import load_recipe

    if tokenizer is not None:
        hint = f"{tokenizer} has the vocabulary it was trained with; leave one of the two out"
        refuse_together("--tokenizer", {"--vocab-size": vocab_size}, hint)
    options = {
        "data.on_invalid": on_invalid,
        "data.train": inputs or None,
        "tokenizer.vocab_size": vocab_size,
        "tokenizer.path": None if tokenizer is None else str(tokenizer),
    }
    resolved = load_recipe(_recipe_name(recipe, kind), collect_overrides(sets, options))
    if dry_run:
        return emit_dry_run(resolved, as_json=as_json)
    result = _write_tokens(resolved, out)
    console.emit_json(result) if as_json else console.emit_pairs(result)


def _recipe_name(recipe: str | None, kind: Kind | None) -> str:
    """Return the recipe that was given, or that of a kind of inputs."""
    if recipe is not None:
        refuse_together("--recipe", {"--kind": kind is not None}, "the recipe has it as `data.kind`")
        return recipe
    if kind is None:
        raise ConfigError(
            "give `--recipe`, or INPUTS with `--kind text` or `--kind smiles`",
            "for example `exlm tokenize corpus/*.txt --kind text --vocab-size 8192 --out tokens`",
        )
    return f"{kind}-small"


def _write_tokens(recipe: "PretrainRecipe", out: Path | None) -> dict[str, object]:
    """Write the tokenizer, the shards and the recipe; return what was made."""
    from exlm_cli.cli import console
    from exlm_cli.config.input_paths import write_run_recipe
    from exlm_cli.data.corpus.prepare import list_rejected, prepare_data

    folder = create_run_dir(out, recipe.name)
    with sole_process(folder, is_new=True):
        progress = console.open_progress()
        data = prepare_data(recipe, progress=progress)
        list_rejected(data, folder / "rejected.csv", progress)
        data.tokenizer.save(folder / "tokenizer.json")
        write_run_recipe(folder, recipe)
    return {
        "tokenizer": folder / "tokenizer.json",
        "recipe": folder / "recipe.yaml",
        "shards": data.train.directory.parent,
        "was_cached": data.was_cached,
        "vocab_size": data.tokenizer.vocab_size,
        "train_sequences": len(data.train),
        "train_tokens": data.train.num_tokens,
        "valid_sequences": len(data.valid),
        "valid_tokens": data.valid.num_tokens,
        **({} if data.spellings is None else {"valid_spellings": len(data.spellings)}),
        "num_rejected": data.num_rejected,
        "fingerprint": data.fingerprint,
    }
