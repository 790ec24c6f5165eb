"""What is said of a cell that is done: means of what is defined, and words where nothing is."""

from typing import Any

import pytest

from exlm_cli.config.cells import CellPlan
from exlm_cli.experiments.board import open_board
from tests.recorder import Recorder
from tests.tiny_grids import tiny_grid

METRICS = {"loss": 2.0, "entropy_bits": 1.5}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[CellPlan]:
    return tiny_grid(tmp_path_factory.mktemp("cache")).plan()


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"diverged": "the loss of step 1 is nan"}, "diverged: the loss of step 1 is nan"),
        ({"metrics": METRICS, "finetune": {}}, "loss 2.000, entropy 1.50 bits"),
        ({"metrics": METRICS | {"entropy_bits": None}, "finetune": {}}, "loss 2.000, entropy not defined"),
        (
            {"metrics": METRICS, "finetune": {"glue/stsb": {"metric": "spearmanr", "values": [None, 0.5, 0.25]}}},
            "loss 2.000, entropy 1.50 bits, glue/stsb spearmanr 0.375",
        ),
        (
            {"metrics": METRICS, "finetune": {"glue/stsb": {"metric": "spearmanr", "values": [None]}}},
            "loss 2.000, entropy 1.50 bits, glue/stsb spearmanr not defined",
        ),
        (
            {"metrics": METRICS, "finetune": {"glue/rte": {"diverged": "the loss of step 1 is nan"}}},
            "loss 2.000, entropy 1.50 bits, glue/rte diverged",
        ),
    ],
)
def test_a_finished_cell_is_told(plans: list[CellPlan], result: dict[str, Any], said: str) -> None:
    progress = Recorder()
    with open_board(plans, dict.fromkeys((plan.folder for plan in plans), None), progress) as board:
        board.finish(plans[1], result)
    assert progress.said == [f"k2-p0.5/seed-1: {said} (1 of 2 cells)"]
