"""Watch on the DAG of a run: a message, or the end of the run, where masks are passed over or one state is left."""

from collections.abc import Mapping

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import CollapsedError
from exlm_cli.format import format_percent
from exlm_cli.progress import Progress
from exlm_cli.train.task import Callback

MAX_PASSED_OVER_SHARE = 0.05
MIN_STATES = 1.05
"""Effective states of a mask from which more than one counts as in use."""


class CollapseWatch(Callback):
    """Look at every validation of a run; `train.on_collapse` says what follows, once for each kind of collapse."""

    def __init__(self, recipe: PretrainRecipe, progress: Progress) -> None:
        self.recipe = recipe
        self.progress = progress
        self._reported: set[str] = set()

    def on_validate(self, step: int, figures: Mapping[str, float]) -> None:
        """Report what the figures show.

        Raises:
            CollapsedError: The DAG has collapsed and `train.on_collapse` is `stop`.
        """
        for kind, (finding, cure) in find_collapse(figures, self.recipe).items():
            message = f"the DAG of step {step} has collapsed: {finding}"
            if self.recipe.train.on_collapse == "stop":
                raise CollapsedError(message, cure)
            if kind not in self._reported:
                self._reported.add(kind)
                self.progress.message(f"warning: {message}; {cure}")


def find_collapse(figures: Mapping[str, float], recipe: PretrainRecipe) -> dict[str, tuple[str, str]]:
    """Return what is wrong with the DAG of a validation and the cure, by the kind of collapse; empty: nothing."""
    found = {}
    k = recipe.masking.num_states_per_mask
    if (share := figures["masks_with_0_share"]) > MAX_PASSED_OVER_SHARE:
        found["passed over"] = (f"{format_percent(share)} of the masks yield no token", _cure_of_the_path(recipe))
    if k > 1 and (states := figures["effective_states"]) <= MIN_STATES:
        found["one state"] = (f"{states:.2f} of {k} states of a mask are in use", _cure_of_the_states(recipe))
    return found


def _cure_of_the_path(recipe: PretrainRecipe) -> str:
    transition = recipe.model.transition
    missing = []
    if transition.rope == "none":
        missing.append("`model.transition.rope=nodes`")
    if transition.start in ("formula", "hazard"):
        missing.append("`model.transition.start=next_mask`")
    return f"start a new run with {' and '.join(missing) or f'a lower `optim.lr` (now {recipe.optim.lr:g})'}"


def _cure_of_the_states(recipe: PretrainRecipe) -> str:
    missing = []
    if recipe.model.mask_attention == "all":
        missing.append("`model.mask_attention=first`")
    if recipe.model.clone_embedding == "none":
        missing.append("`model.clone_embedding=nodes` with `model.clone_init_std=1`")
    if not recipe.model.transition.balance:
        missing.append("`model.transition.balance=0.1`")
    if not missing:
        return "`masking.num_states_per_mask=1` predicts the same for less"
    return f"to keep states apart, start a new run with {', '.join(missing)}"
