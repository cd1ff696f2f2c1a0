"""A job on machines that SkyPilot finds on clouds, Kubernetes or machines of one's own."""

from collections.abc import Mapping

from monarch_nb.job.adapted import AdapterJob
from monarch_nb.job.role import Role


class SkyPilotJob(AdapterJob):
    """A host agent on each node of a SkyPilot cluster: `SkyPilotJob({"trainers": 4}, accelerators="H100:8")`.

    Meshes whose hosts are alike share one cluster, which is taken down by `kill()`, and by SkyPilot once the hosts have
    been unused for `idle_minutes` more. `setup` is the shell command that installs monarch-nb in the environment of
    `python_exe`, which must have the Python of this program. What the `resources` of a SkyPilot task take is given in
    `resources`, beside the usual `infra`, `accelerators`, `cpus`, `memory`, `use_spot` and `image`. The agents are met
    at the nodes' addresses, at `monarch_port`, which SkyPilot opens; only who has the job's key is let in, which goes
    there as a secret of the task.
    Needs `pip install 'monarch-nb[skypilot]'`. Raises EngineError, with the words of SkyPilot.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", infra: str | None = None, accelerators: str | None = None,
        cpus: str | int | None = None, memory: str | int | None = None, use_spot: bool = False,
        image: str | None = None, setup: str = "", resources: Mapping[str, object] | None = None,
        idle_minutes: int = 10, python_exe: str = "python3", monarch_port: int = 26600,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        asked = {"infra": infra, "accelerators": accelerators, "cpus": cpus, "memory": memory, "image_id": image}
        wanted = {name: value for name, value in asked.items() if value is not None} | dict(resources or {})
        options = {
            "resources": {**wanted, "use_spot": use_spot}, "setup": setup, "idle_minutes": idle_minutes,
            "python": python_exe, "port": monarch_port,
        }  # fmt: skip
        super().__init__("skypilot", meshes, env, options=options)
