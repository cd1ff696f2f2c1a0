"""Runs random programs, and prints the outcomes: `python -m tests.random_programs --count 1000`."""

import argparse
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.random_programs.results import Results
from tests.random_programs.runner import MESHES, Report, Tally, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first program; others follow (default: the time)"
    )
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--meshes", nargs="+", default=None, metavar="2x2", help="shapes of meshes, taken in turn")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="processes, each with meshes of its own")
    parser.add_argument("--no-shrink", action="store_true", help="print failing programs as they are")
    parser.add_argument("--show", action="store_true", help="print the programs, and run none")
    parser.add_argument(
        "--results",
        type=Path,
        default=None,
        help="a file that results are added to: those that were right or refused there are not run again",
    )
    parser.add_argument("--device", default="cpu", help="what the ranks compute on: cpu, or cuda")
    parser.add_argument(
        "--compiled", default="", metavar="BACKEND", help="call each as a step compiled by python, fx …"
    )
    parser.add_argument("--report", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    meshes = [tuple(map(int, text.split("x"))) for text in options.meshes] if options.meshes else list(MESHES)
    if options.report is not None:
        work(options.report, meshes, not options.no_shrink, options.device, options.compiled)
        return 0
    seed = options.seed if options.seed is not None else int(time.time()) % 1_000_000 * 100_000
    seeds = range(seed, seed + options.count)
    if options.show:
        show(seeds, meshes)
        return 0
    print(f"{options.count} programs from seed {seed}", flush=True)
    tally = Tally()
    results = Results(options.results) if options.results else None
    if results is not None:
        for report in results.known(seeds):
            tally.add(report)
    begun, before = time.monotonic(), tally.count

    def note(report: Report) -> None:
        tally.add(report)
        if results is not None:
            results.add(report)
        if report.has_failed or report.kind == "unjudged":
            print(report, flush=True)
        if tally.count % 100 == 0:
            rate = (tally.count - before) / (time.monotonic() - begun)
            print(f"{tally.count} of {options.count}, {rate:.1f} a second", file=sys.stderr, flush=True)

    rest = [seed for seed in seeds if seed not in tally.seeds]
    with contextlib.suppress(KeyboardInterrupt):
        run(rest, meshes, jobs=max(1, min(options.jobs, len(rest))), on_report=note, shrink=not options.no_shrink,
            device=options.device, compiled=options.compiled)  # fmt: skip
    print(tally)
    if tally.count < options.count:
        print(f"{options.count - tally.count} of {options.count} were not run")
        return 1
    return 1 if tally.failures or tally.too_many_refused or tally.too_many_unjudged else 0


def show(seeds: range, meshes: list[tuple[int, ...]]) -> None:
    from tests.random_programs.generator import generate
    from tests.random_programs.program import paste_text
    from tests.random_programs.runner import mesh_of

    for seed in seeds:
        print(paste_text(generate(seed, mesh_of(seed, meshes))))


def work(report: int, meshes: list[tuple[int, ...]], shrink: bool, device: str, compiled: str) -> None:
    import torch

    from tests.random_programs.fleet import Fleet
    from tests.random_programs.worker import reports

    torch.set_num_threads(1)
    seeds = json.loads(sys.stdin.readline())
    fleet = Fleet(meshes, device)
    try:
        with os.fdopen(report, "w", buffering=1) as out:
            for result in reports(seeds, fleet, meshes, shrink, compiled):
                out.write(json.dumps(asdict(result)) + "\n")
    finally:
        fleet.stop()


if __name__ == "__main__":
    sys.exit(main())
