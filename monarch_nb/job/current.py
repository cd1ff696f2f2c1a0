"""The current job of a folder, by name: `.monarch/current_job` holds `module.attribute`."""

import importlib
from pathlib import Path

from monarch_nb.job import record
from monarch_nb.job.trait import JobTrait
from monarch_nb.wire import kind_of

_FILE = ".monarch/current_job"


def set_current_job(module_path: str) -> None:
    """Makes the job at `module.attribute` the current one of this folder. Nothing is imported yet.

    Raises ValueError for an invalid path.
    """
    parts = module_path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{module_path!r} does not name a job: it should look like module.attribute")
    record.write(_FILE, module_path.encode() + b"\n")


def load_current_job() -> JobTrait:
    """Returns the current job of this folder, as its module defines it; its `state()` finds it where it runs.

    Raises FileNotFoundError if none was set, AttributeError or TypeError if there is no job of that name.
    """
    try:
        module_path = record.read(_FILE).decode().strip()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no current job in {Path.cwd()}: set_current_job('module.attribute') names one"
        ) from None
    name, _, attribute = module_path.rpartition(".")
    module = importlib.import_module(name)
    job = getattr(module, attribute, None)
    if job is None:
        raise AttributeError(f"module {name!r} has no {attribute!r}")
    if not isinstance(job, JobTrait):
        raise TypeError(f"{module_path} is {kind_of(job)}, not a job")
    return job
