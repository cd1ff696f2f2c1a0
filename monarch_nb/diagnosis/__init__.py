"""Diagnosis of a mesh that makes no progress, and of ranks that hold the others up.

monarch.diagnose()                      # of all calls under way
monarch.diagnose(trainers).findings[0]  # kind, ranks, the line of your program, and a sentence
abort(trainers)                         # ends the calls that the findings explain; the processes live on
stragglers(trainers)                    # which ranks are slow, and in what
compare_memory(trainers)                # which ranks use more memory than others
compare_replicas(trainers)              # which ranks' parameters differ from the rest
with monarch.watch(trainers) as found:  # where the first NaN comes from
    ...
"""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.diagnosis.collector import abort, diagnose
    from monarch_nb.diagnosis.diverged import ReplicaWatch, compare_replicas
    from monarch_nb.diagnosis.findings import CallAbortedError, Diagnosis, Finding, Kind
    from monarch_nb.diagnosis.memory import MemoryWatch, compare_memory
    from monarch_nb.diagnosis.nonfinite import ValueWatch, has_sharded_tensors, watch
    from monarch_nb.diagnosis.slow import StragglerWatch, stragglers

__all__ = [
    "CallAbortedError",
    "Diagnosis",
    "Finding",
    "Kind",
    "MemoryWatch",
    "ReplicaWatch",
    "StragglerWatch",
    "ValueWatch",
    "abort",
    "compare_memory",
    "compare_replicas",
    "diagnose",
    "has_sharded_tensors",
    "stragglers",
    "watch",
]

_FINDINGS = ("CallAbortedError", "Diagnosis", "Finding", "Kind")
__getattr__ = lazy_names(
    __name__,
    {
        "collector": ("abort", "diagnose"),
        "diverged": ("ReplicaWatch", "compare_replicas"),
        "findings": _FINDINGS,
        "memory": ("MemoryWatch", "compare_memory"),
        "nonfinite": ("ValueWatch", "has_sharded_tensors", "watch"),
        "slow": ("StragglerWatch", "stragglers"),
    },
)
