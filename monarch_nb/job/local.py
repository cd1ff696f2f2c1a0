"""A job on this machine alone: `this_host()` under the names that a larger job would have."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from monarch_nb.host.bootstrap import untraced
from monarch_nb.job.adapter import HERE, Agent, Agents, AgentsWanted, JobAdapter, Running, Seen
from monarch_nb.job.adapter_job import AdapterForm, AdapterJob
from monarch_nb.job.kinds import register_job
from monarch_nb.job.trait import BATCH_FILE, JobTrait

BATCH = "MONARCH_BATCH_JOB"


class _LocalForm(AdapterForm):
    """The saved attributes of a local job."""

    _log_dir: str | None = None


class LocalJob(AdapterJob):
    """A job that has `this_host()` for each name, so that a program runs here as it does on a cluster."""

    _transient = AdapterJob._transient | {"_process"}
    _form = _LocalForm
    _cacheable = False  # another process cannot use it

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__("local", dict.fromkeys([hosts] if isinstance(hosts, str) else hosts, 1))
        self._log_dir: str | None = None

    def _restored(self) -> None:
        super()._restored()
        self._process: subprocess.Popen[bytes] | None = None

    def _create(self, client_script: str | None) -> None:
        self._start(Path())
        if client_script is None:
            return
        os.makedirs(".monarch/logs", mode=0o700, exist_ok=True)
        self._log_dir = tempfile.mkdtemp(prefix="job_", dir=os.path.abspath(".monarch/logs"))
        file = os.path.join(self._log_dir, "job.json")
        self.dump(file)
        with (
            open(os.path.join(self._log_dir, "stdout.log"), "wb") as out,
            open(os.path.join(self._log_dir, "stderr.log"), "wb") as err,
        ):
            self._process = subprocess.Popen(
                untraced([sys.executable, client_script]), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={**os.environ, BATCH: "1", BATCH_FILE: file}, start_new_session=True,
            )  # fmt: skip

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The client script that `apply` has started here. Raises ValueError if there is none."""
        if self._process is None:
            raise ValueError("this job has started no client script here")
        return self._process

    def _wishes(self) -> str:
        return ", ".join(self._meshes)

    def can_run(self, spec: JobTrait) -> bool:
        """Returns False: a new job costs nothing."""
        return False

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class OwnHost(JobAdapter):
    """The host of this process, whose agent exists already, or is started when it is first needed."""

    keep_s = None  # it ends with this process
    watch_s = 0.0

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts nothing. Raises ValueError for meshes of several hosts."""
        if any(not name.endswith("_0") for name in wanted.names):
            raise ValueError("a local job has this host alone, one for each mesh; jobs of kind 'process' have several")
        return {name: Agent("", HERE) for name in wanted.names}

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the agents as running, as this process runs."""
        return {name: Seen("running", joins=(HERE,)) for name in job.agents}

    def kill(self, job: Running) -> None:
        """Ends nothing: the agent ends with this process."""

    def running(self) -> Mapping[str, Running]:
        """Returns no jobs: others cannot use them."""
        return {}


register_job("local", OwnHost)
