"""A short slice of the campaign: cases of every area but those that start processes, which `tests/integration` has."""

from tests.campaign.__main__ import planned
from tests.campaign.areas import AREAS
from tests.campaign.engine import run_jobs


def test_a_slice_of_the_campaign_finds_nothing():
    names = [name for name, area in AREAS.items() if not area.starts_processes]
    records = list(run_jobs(AREAS, planned(names, share=0.004), campaign_seed=39, num_workers=1))
    assert {record["area"] for record in records} == set(names)
    assert [record for record in records if record["faults"]] == []
