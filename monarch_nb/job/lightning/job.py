"""A job on machines of a Lightning teamspace."""

from collections.abc import Mapping

from monarch_nb.job.adapted import AdapterJob
from monarch_nb.job.role import Role


class LightningJob(AdapterJob):
    """A host agent on each machine of a Lightning job: `LightningJob({"trainers": 4}, machine="L4_X_4")`.

    To be used in a Studio: its files, the job's key among them, go to the machines as Lightning's own snapshot of it,
    and its environment is theirs. The agents are met at their private addresses, at `monarch_port`. Meshes whose hosts
    are alike share one Lightning job. `teamspace` and `studio` are those of this Studio unless they are named;
    `max_runtime` seconds after its start Lightning ends the job.
    Needs `pip install 'monarch-nb[lightning]'`. Raises EngineError, with the words of Lightning.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", machine: str = "CPU", teamspace: str | None = None,
        studio: str | None = None, interruptible: bool = False, max_runtime: int | None = None,
        python_exe: str = "python", monarch_port: int = 26600, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        options = {
            "machine": machine, "teamspace": teamspace, "studio": studio, "interruptible": interruptible,
            "max_runtime": max_runtime, "python": python_exe, "port": monarch_port,
        }  # fmt: skip
        given = {name: value for name, value in options.items() if value is not None}
        super().__init__("lightning", meshes, env, options=given)
