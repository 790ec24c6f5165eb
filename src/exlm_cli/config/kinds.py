"""Every kind of recipe. A new command that takes recipes adds its kind here."""

from collections.abc import Iterable

from exlm_cli.config.base import Recipe
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.repeat_mlm import RepeatMlmRecipe
from exlm_cli.config.sweep import SweepRecipe

KINDS: tuple[type[Recipe], ...] = (PretrainRecipe, SweepRecipe, RepeatMlmRecipe, FinetuneRecipe)


def kind_of_keys(keys: Iterable[str]) -> type[Recipe] | None:
    """Return the only kind that has all these top-level keys; None where there is no such kind or more than one."""
    given = set(keys)
    fitting = [kind for kind in KINDS if given <= kind.model_fields.keys()]
    return fitting[0] if len(fitting) == 1 else None
