"""Ids of hosts that launchers assign, passed in the environment and in front of addresses.

Hosts here report their own ids when they are attached; these are for launchers of torchmonarch.
"""

import json
import os
from collections.abc import Sequence

from monarch_nb.runtime.ids import ProcId, Uid

SERVICE_PROC_IDS_ENV = "MONARCH_SERVICE_PROC_IDS"
"""The environment variable with the ids of all hosts of a job, as JSON."""
SERVICE_PROC_RANK_ENV = "MONARCH_SERVICE_PROC_RANK"
"""The environment variable with the index of the host's own id."""


def new_service_proc_id() -> ProcId:
    """Returns a new, unique id for a host."""
    return ProcId(Uid.instance("service"))


def serialize_service_proc_ids(proc_ids: Sequence[ProcId]) -> str:
    """Returns ids as text for `SERVICE_PROC_IDS_ENV`."""
    return json.dumps([str(proc_id) for proc_id in proc_ids])


def deserialize_service_proc_ids(serialized: str) -> list[ProcId]:
    """Parses the text of `serialize_service_proc_ids`. Raises ValueError for any other text."""
    texts = json.loads(serialized)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{serialized[:80]!r} is not a JSON list of process ids")
    return [ProcId.from_string(text) for text in texts]


def ranked_service_proc_id_from_env(*, rank_env: str = SERVICE_PROC_RANK_ENV) -> ProcId | None:
    """Returns the id of this host, if the environment names one. Raises ValueError for a rank that has none."""
    ids, rank = os.environ.get(SERVICE_PROC_IDS_ENV), os.environ.get(rank_env)
    if ids is None or rank is None:
        return None
    proc_ids = deserialize_service_proc_ids(ids)
    if not rank.isdigit() or int(rank) >= len(proc_ids):
        raise ValueError(f"{rank_env}={rank}, but {SERVICE_PROC_IDS_ENV} has the ids of {len(proc_ids)} hosts")
    return proc_ids[int(rank)]


def service_proc_addr(address: str, proc_id: ProcId | None) -> str:
    """Returns the address of a worker with its id, if it has one, in front."""
    return address if proc_id is None else f"{proc_id}@{address}"


def service_proc_addrs(addresses: Sequence[str], proc_ids: Sequence[ProcId] | None) -> list[str]:
    """Returns the same for several workers. Raises ValueError unless there are as many ids."""
    if proc_ids is None:
        return list(addresses)
    if len(addresses) != len(proc_ids):
        raise ValueError(f"{len(addresses)} addresses of workers, but {len(proc_ids)} ids")
    return [service_proc_addr(address, proc_id) for address, proc_id in zip(addresses, proc_ids, strict=True)]
