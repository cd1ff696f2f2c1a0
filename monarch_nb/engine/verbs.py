"""All messages between engines, for checks and descriptions. Packages declare theirs in a module `verbs`."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import monarch_nb.collectives.verbs
import monarch_nb.debug.verbs
import monarch_nb.diagnosis.verbs
import monarch_nb.host.verbs
import monarch_nb.logs.verbs
import monarch_nb.mesh.verbs
import monarch_nb.profiling.verbs
import monarch_nb.rdma.verbs
import monarch_nb.runtime.verbs
import monarch_nb.store.verbs
import monarch_nb.telemetry.verbs
import monarch_nb.tensor.verbs
from monarch_nb.wire import Verb, VerbTakenError


def verbs_of(modules: Iterable[ModuleType]) -> dict[str, Verb[Any, Any]]:
    """Returns the verbs that modules declare, by name, in order. Raises VerbTakenError where two have one name."""
    verbs: dict[str, Verb[Any, Any]] = {}
    for module in modules:
        for verb in vars(module).values():
            if isinstance(verb, Verb) and verbs.setdefault(verb.name, verb) is not verb:
                raise VerbTakenError(f"two verbs have the name {verb.name}; one is declared in {module.__name__}")
    return verbs


ALL = verbs_of(
    (
        monarch_nb.host.verbs,
        monarch_nb.logs.verbs,
        monarch_nb.runtime.verbs,
        monarch_nb.mesh.verbs,
        monarch_nb.collectives.verbs,
        monarch_nb.debug.verbs,
        monarch_nb.store.verbs,
        monarch_nb.telemetry.verbs,
        monarch_nb.profiling.verbs,
        monarch_nb.diagnosis.verbs,
        monarch_nb.rdma.verbs,
        monarch_nb.tensor.verbs,
    )
)
