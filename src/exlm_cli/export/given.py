"""Runs as users give them: a folder, `bundled:NAME`, `hub:OWNER/NAME` or `hf:NAME`. Importing this loads no torch."""

from pathlib import Path

from exlm_cli.bundled_models import local_path
from exlm_cli.config.tasks import InputKind
from exlm_cli.progress import Progress


def is_on_hub(given: Path) -> bool:
    """Return whether a run was given as `hub:OWNER/NAME[@REVISION]`."""
    return str(given).startswith("hub:")


def local_run(given: Path, progress: Progress, kind: InputKind = "text") -> Path:
    """Return a run directory as given, for `bundled:NAME` that in the package, for `hub:` and `hf:` a cached copy.

    `kind` is what a model of transformers reads, whose files do not say it.

    Raises:
        CheckpointError: The package or the Hub has no such run, or the Hub cannot be reached.
        ConfigError: transformers is needed and not installed.
        TokenizerError: The tokenizer of a model of transformers cannot be used.
    """
    if is_on_hub(given):
        from exlm_cli.export.hub import fetch_run

        return fetch_run(str(given), progress)
    if str(given).startswith("hf:"):
        from exlm_cli.export.intake import take_in

        return take_in(str(given), progress, kind)
    return local_path(given)
