"""Areas of the campaign by name, with their number of cases and limits."""

from tests.campaign import damaged, kills, surroundings
from tests.campaign.engine import Area

AREAS = {
    "damaged runs": Area(damaged.checkpoints, 1500),
    "runs on the Hub": Area(surroundings.hub, 200),
    "full and read-only disks": Area(surroundings.disks, 120, seconds=120),
    "kills of pre-training": Area(kills.killed_pretraining, 100, seconds=600, starts_processes=True),
    "kills of fine-tuning": Area(kills.killed_finetuning, 30, seconds=600, starts_processes=True),
    "kills of sweeps": Area(kills.killed_sweep, 30, seconds=600, starts_processes=True),
}
