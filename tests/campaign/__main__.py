"""`python -m tests.campaign`: runs cases, goes on where it was stopped, and prints a table; exit 1 on a violation."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exlm_cli.run_dir import source_commit
from tests.campaign.areas import AREAS
from tests.campaign.engine import Job, load_records, run_jobs

STATE = Path("build/campaign")


def main(arguments: Sequence[str] | None = None) -> int:
    total = sum(area.cases for area in AREAS.values())
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--area", action="append", choices=AREAS, help="only this one (repeatable)")
    parser.add_argument("--cases", type=int, default=total, help=f"of all areas together; default: {total:,}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case of each area alone, not from the file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write the table there, as Markdown")
    given = parser.parse_args(arguments)
    names = given.area or list(AREAS)
    if given.only is not None:
        records = list(run_jobs(AREAS, [Job(name, given.only) for name in names], given.seed, 1))
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return int(any(record["faults"] for record in records))
    name, _, dirty = (source_commit() or "unknown").partition("-")
    commit = "-".join(filter(None, (name[:10], dirty)))
    state = STATE / f"{commit}-{given.seed}.jsonl"
    jobs = planned(names, given.cases / total)
    done = {} if commit.endswith("-dirty") else load_records(state)
    left = [job for job in jobs if job not in done]
    print(f"{len(jobs):,} cases, {len(jobs) - len(left):,} of them done before; {state}", file=sys.stderr)
    run_rest(left, state, done, given.seed, given.workers)
    table = as_table([done[job] for job in jobs], names)
    about = f"commit {commit}, seed {given.seed}, {given.workers} worker(s), {os.cpu_count()} CPU cores"
    print(f"{about}\n\n{table}")
    if given.table:
        given.table.write_text(f"{about}\n\n{table}\n", encoding="utf-8")
    return int(any(done[job]["faults"] for job in jobs))


def planned(names: Sequence[str], share: float) -> list[Job]:
    """Return the cases of a share of the campaign; at least one of each area."""
    return [Job(name, number) for name in names for number in range(max(1, round(AREAS[name].cases * share)))]


def run_rest(left: list[Job], state: Path, done: dict[Job, dict[str, Any]], seed: int, workers: int) -> None:
    """Run cases, add their records to the file and to `done`, and print each violation when it is found."""
    state.parent.mkdir(parents=True, exist_ok=True)
    mode = "a" if done else "w"
    with state.open(mode, encoding="utf-8") as file:
        for count, record in enumerate(run_jobs(AREAS, left, seed, workers), start=1):
            done[Job(record["area"], record["number"])] = record
            file.write(json.dumps(record) + "\n")
            file.flush()
            if record["faults"]:
                print(f"violation: {record['area']} {record['number']}: {record['faults'][0]}", file=sys.stderr)
                print(f"  {record['commands'][-1:]}", file=sys.stderr)
            if count % 500 == 0:
                print(f"{count:,}/{len(left):,}", file=sys.stderr)


def as_table(records: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return a Markdown table with a row for each area, and their sum."""
    groups = {name: [record for record in records if record["area"] == name] for name in names}
    lines = ["| area | cases | violations | slowest | peak memory above rest |", "|---|---:|---:|---:|---:|"]
    for name, group in [*groups.items(), ("all", list(records))]:
        violations = sum(bool(record["faults"]) for record in group)
        slowest, largest = (max(record[key] for record in group) for key in ("seconds", "mebibytes"))
        lines.append(f"| {name} | {len(group):,} | {violations:,} | {slowest:.1f} s | {largest:,.0f} MiB |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
