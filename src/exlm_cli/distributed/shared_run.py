"""Run directory of several ranks: rank 0 makes and locks it, and every rank must see it and train the same recipe."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from exlm_cli.config.base import Recipe
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
        folder = Path()
        # a new name each time: no file system has cached that it does not exist, and no other folder has it
        token = f".seen-by-every-rank.writing-{secrets.token_hex(8)}"

        def take() -> str:
            nonlocal folder
            folder = make()
            stack.enter_context(sole_process(folder, is_new=is_new))
            if ranks.size > 1:
                write_atomically(folder / token, b"")
            return str((folder / token).absolute())

        shared = Path(ranks.first(take))
        if ranks.is_first:
            ranks.together(lambda: None)
            shared.unlink(missing_ok=True)
        else:
            folder = shared.parent
            ranks.together(lambda: _refuse_unseen(shared, ranks))
        yield folder


def require_same_recipe(ranks: Ranks, recipe: Recipe) -> None:
    """Refuse ranks whose recipe is not that of rank 0.

    Raises:
        ConfigError: Names the rank and what differs.
    """
    first, *others = ranks.exchange(recipe.model_dump(mode="json"))
    for rank, other in enumerate(others, start=1):
        if other != first:
            keys = ", ".join(f"`{key}`" for key in changed_keys(first, other))
            raise ConfigError(
                f"rank {rank} and rank 0 were given different recipes; they differ in {keys}",
                "start every rank with the same command and the same recipe files",
            )


def require_same_data(ranks: Ranks, fingerprint: str) -> None:
    """Refuse ranks whose data is not that of rank 0.

    Raises:
        ConfigError: Names the rank.
    """
    first, *others = ranks.exchange(fingerprint)
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise ConfigError(
                f"rank {rank} and rank 0 read different data under the same names",
                "put the data where all nodes see the same files",
            )


def _refuse_unseen(token: Path, ranks: Ranks) -> None:
    if not token.is_file():
        raise CheckpointError(
            f"{token.parent}: rank {ranks.rank} does not see the run directory that rank 0 made",
            "choose a folder that all nodes share with `out=DIR`",
        )
