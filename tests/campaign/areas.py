"""Areas of the campaign by name, with their number of cases and limits."""

from tests.campaign import damaged, inputs, kills, surroundings
from tests.campaign.engine import Area

AREAS = {
    "recipes": Area(inputs.recipes, 2200),
    "command lines": Area(inputs.words, 1000),
    "data files": Area(inputs.data, 2400),
    "SMILES": Area(inputs.molecules, 800),
    "inspect-dag": Area(inputs.inspected, 600),
    "fine-tuning tables": Area(inputs.tables, 300),
    "predict and embed": Area(inputs.predicted, 700),
    "damaged runs": Area(damaged.checkpoints, 1500),
    "crafted files": Area(damaged.crafted, 88, seconds=120),
    "runs on the Hub": Area(surroundings.hub, 200),
    "pushes": Area(surroundings.pushes, 40, seconds=300, starts_processes=True),
    "full and read-only disks": Area(surroundings.disks, 120, seconds=120),
    "a user without rights": Area(surroundings.without_rights, 100, seconds=120, starts_processes=True),
    "endless files": Area(surroundings.endless, 8, seconds=120, starts_processes=True),
    "export": Area(surroundings.exports, 12, seconds=600, starts_processes=True),
    "processes side by side": Area(kills.side_by_side, 40, seconds=600, starts_processes=True),
    "kills of pre-training": Area(kills.killed_pretraining, 100, seconds=600, starts_processes=True),
    "kills of fine-tuning": Area(kills.killed_finetuning, 30, seconds=600, starts_processes=True),
    "kills of sweeps": Area(kills.killed_sweep, 30, seconds=600, starts_processes=True),
}
