"""`python -m tests.campaign`: runs cases, goes on where it was stopped, and prints violations; exit 1 where one is."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from exlm_cli.run_dir import source_commit
from tests.campaign.areas import AREAS
from tests.campaign.engine import Job, run_jobs

STATE = Path("build/campaign")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--area", action="append", choices=AREAS, help="only this one (repeatable)")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each area; at least one is run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case of each area alone, not from the file")
    given = parser.parse_args(arguments)
    names = given.area or list(AREAS)
    jobs = planned(names, given.share) if given.only is None else [Job(name, given.only) for name in names]
    commit = source_commit() or "dirty"
    is_new = given.only is not None or commit.endswith("dirty")
    state = STATE / ("last.jsonl" if is_new else f"{commit}-{given.seed}.jsonl")
    state.parent.mkdir(parents=True, exist_ok=True)
    has_records = state.exists() and not is_new
    records = [json.loads(line) for line in state.read_text("utf-8").splitlines()] if has_records else []
    done = {Job(record["area"], record["number"]) for record in records}
    with state.open("w" if is_new else "a", encoding="utf-8") as file:
        for record in run_jobs(AREAS, [job for job in jobs if job not in done], given.seed, given.workers):
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            if record["faults"] or given.only is not None:
                print(json.dumps(record, indent=1, ensure_ascii=False))
    cases, violations = (Counter(r["area"] for r in records if r["faults"] or each) for each in (True, False))
    for name in cases:
        print(f"{name}: {cases[name]:,} cases, {violations[name]:,} violations")
    return int(bool(violations))


def planned(names: Sequence[str], share: float) -> list[Job]:
    """Return the cases of a share of the campaign; at least one of each area."""
    return [Job(name, number) for name in names for number in range(max(1, round(AREAS[name].cases * share)))]


if __name__ == "__main__":
    sys.exit(main())
