"""Where the hosts of a job are met, host by host, for who looks for the leg that is shut."""

from pathlib import Path

from msgspec import Struct

from monarch_nb.job.adapted import AdapterJob
from monarch_nb.job.adapter import EngineError


class HostOfJob(Struct, frozen=True):
    """One host as its engine sees it now."""

    name: str
    runs: bool
    story: str  # in the engine's words
    addresses: tuple[str, ...]  # where this process would meet it; none while that is not known
    key: Path | None  # of the job
    wrong: str = ""  # with the way to it


def hosts_of_job(job: AdapterJob) -> list[HostOfJob]:
    """All of them. Blocks; opens the job's tunnels. Raises EngineError where the engine cannot be asked."""
    running, found = job._job, []
    key = Path(running.folder, "key")
    job._adapter.hold(running, True)
    for name, seen in job._adapter.look(running).items():
        joins: tuple[str, ...] = ()
        wrong = ""
        if seen.state == "running" and seen.joins:
            try:
                joins = tuple(job._adapter.join(running, name, seen.joins))
            except EngineError as error:
                wrong = str(error)
        found.append(HostOfJob(name, seen.state == "running", seen.story, joins, key if key.exists() else None, wrong))
    return found
