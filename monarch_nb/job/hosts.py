"""Host meshes by name, for programs that do not say where they run."""

import atexit

from monarch_nb.job.process import ProcessJob
from monarch_nb.mesh import HostMesh


def hosts_from_config(name: str) -> HostMesh:
    """The host mesh of that name; in this version always two worker processes on this machine.

    They end with this process.
    """
    job = ProcessJob({name: 2})
    job.apply()
    atexit.register(job.kill)
    return job._state()._hosts[name]
