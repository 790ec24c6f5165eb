"""Run directory of several ranks: rank 0 makes and locks it, and every rank must see it and train the same recipe."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from exlm_cli.config.overrides import changed_keys
from exlm_cli.distributed.ranks import Ranks
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import write_atomically
from exlm_cli.run_dir import sole_process


@contextmanager
def hold_run(ranks: Ranks, make: Callable[[], Path], *, is_new: bool) -> Iterator[Path]:
    """Make or take a run directory on rank 0 and lock it; yield it on every rank.

    Args:
        ranks: All of them call this.
        make: Returns the directory; called on rank 0 alone.
        is_new: `make` made it just now; delete it again if a rank does not see it.

    Raises:
        CheckpointError: `make` raised it, another process is using it, or a rank does not see the directory.
    """
    with ExitStack() as stack:

        def take() -> tuple[str, str]:
            run = make()
            stack.enter_context(sole_process(run, is_new=is_new))
            # a new name each time: no file system has cached that it does not exist, and no other folder has it
            token = run.absolute() / f".seen-by-every-rank.writing-{secrets.token_hex(8)}"
            if ranks.size > 1:
                write_atomically(token, b"")
            return str(run), str(token)

        def refuse_unseen() -> None:
            if ranks.size > 1 and not token.is_file():
                raise CheckpointError(
                    f"{token.parent}: rank {ranks.rank} does not see the run directory that rank 0 made",
                    "choose a folder that all nodes share with `--out DIR`",
                )

        run, token = map(Path, ranks.on_rank_0(take))
        ranks.on_all_ranks(refuse_unseen)
        if ranks.is_first:
            token.unlink(missing_ok=True)
        yield run if ranks.is_first else token.parent


def require_same(ranks: Ranks, values: Mapping[str, Any], difference: str, hint: str) -> None:
    """Refuse ranks whose values, such as a recipe, are not those of rank 0.

    Args:
        difference: What two ranks do where they differ, in words.
        hint: What to do then.

    Raises:
        ConfigError: Names the rank and the keys.
    """
    first, *others = ranks.all_gather_object(values)
    for rank, other in enumerate(others, start=1):
        if other != first:
            keys = ", ".join(f"`{key}`" for key in changed_keys(first, other))
            raise ConfigError(f"rank {rank} and rank 0 {difference}; they differ in {keys}", hint)
