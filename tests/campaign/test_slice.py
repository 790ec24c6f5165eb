"""A short slice of the campaign: some cases of every area, none of which may find anything."""

import pytest

from tests.campaign.__main__ import planned
from tests.campaign.areas import AREAS
from tests.campaign.engine import run_jobs

SHARE = 0.02
SEED = 20


@pytest.mark.parametrize("is_of_processes", [False, True], ids=["inputs", "processes"])
def test_a_slice_of_the_campaign_finds_nothing(is_of_processes: bool) -> None:
    names = [name for name, area in AREAS.items() if area.starts_processes == is_of_processes]
    records = list(run_jobs(AREAS, planned(names, SHARE), SEED, num_workers=1))
    assert {record["area"] for record in records} == set(names)
    assert [record for record in records if record["faults"]] == []
