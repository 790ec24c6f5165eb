"""Fine-tuning recipe: values that do not go together, and warm-up by ratio."""

from typing import Any

import pytest
from pydantic import ValidationError

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.sections import OptimConfig


def recipe(**sections: Any) -> FinetuneRecipe:
    content = {"name": "tiny", "task": {"name": "csv"}, "optim": {"lr": 1e-3}} | sections
    return FinetuneRecipe.model_validate(content)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"seeds": [1, 2, 1]}, "`seeds` [1, 2, 1] names a seed twice"),
        ({"optim": {"lr": 1e-3, "transition_lr_scale": 0.5}},
         "`optim.transition_lr_scale` is pre-training's: fine-tuning has no transition head"),
        ({"optim": {"lr": 1e-3, "transition_start_ratio": 0.5}},
         "`optim.transition_start_ratio` is pre-training's: fine-tuning has no transition head"),
        ({"optim": {"lr": 1e-3, "warmup_steps": 5}, "train": {"max_steps": 4}},
         "`optim.warmup_steps` 5 is more than `train.max_steps` 4"),
        ({"optim": {"lr": 1e-3, "warmup_steps": 5, "warmup_ratio": 0.1}},
         "give `optim.warmup_steps` or `optim.warmup_ratio`, not both"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        recipe(**sections)
    (finding,) = caught.value.errors()
    assert finding["msg"] == f"Value error, {message}"


@pytest.mark.parametrize(
    ("ratio", "total", "steps"), [(0.06, 100, 6), (0.06, 101, 7), (0.0, 100, 0), (0.06, 1, 1), (None, 100, 9)]
)
def test_a_ratio_of_warm_up_is_rounded_up_to_steps(ratio: float | None, total: int, steps: int) -> None:
    optim = OptimConfig(lr=1e-3, warmup_steps=9 if ratio is None else 0, warmup_ratio=ratio)
    assert optim.resolve_warmup_steps(total) == steps
