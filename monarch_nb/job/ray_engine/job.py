"""A job on the nodes of a Ray cluster."""

from collections.abc import Mapping

from monarch_nb.job.adapted import AdapterJob
from monarch_nb.job.role import Role


class RayJob(AdapterJob):
    """A host agent on each of so many nodes of a Ray cluster: `RayJob({"trainers": Role(hosts=4, gpus=8)})`.

    A placement group asks for them: with `strategy` "STRICT_SPREAD" a node each, with "PACK" several may share one. An
    actor of Ray's holds what its agent was given, and ends with it. `address` is the cluster's, by default the one
    that this machine is part of. The agents must be reachable from here at any free port of their nodes.
    Needs `pip install 'monarch-nb[ray]'`, the same on all nodes. Raises EngineError.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", address: str = "auto", strategy: str = "STRICT_SPREAD",
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__("ray", meshes, env, options={"address": address, "strategy": strategy})
