"""Questions about the meshes one process knows. They change nothing."""

from collections.abc import Mapping, Sequence

from .cause import Cause
from .failure import MeshFailure
from .ranks import Selection
from .records import MeshRecords, RankStatus
from .tree import Tree


class MeshQueries:
    """What a machine knows of meshes and owners, for those who ask."""

    def __init__(self) -> None:
        self._records = MeshRecords()
        self._tree = Tree()

    def status(self, mesh_uid: str) -> Mapping[int, RankStatus]:
        """How each rank of a mesh is. Raises KeyError if the mesh is not known here."""
        return self._records.status(mesh_uid)

    def odd(self, mesh_uid: str | None = None) -> list[tuple[str, Cause | None, dict[int, RankStatus]]]:
        """All meshes known here, or one: why each has ended, if so, and its ranks that are not always alive."""
        meshes = self._records.meshes
        chosen = meshes if mesh_uid is None else [mesh_uid] if mesh_uid in meshes else ()
        return [(uid, meshes[uid].ended, dict(meshes[uid].odd)) for uid in chosen]

    def owner_name(self, actor: str) -> str:
        """What people call an owner."""
        record = self._tree.get(actor)
        return record.name if record is not None else actor

    def incarnations(self, mesh_uid: str) -> dict[int, int]:
        """The incarnation of each rank that was ever healed; all others are in their first, 0."""
        odd = self._records.meshes[mesh_uid].odd
        return {rank: status.incarnation for rank, status in odd.items() if status.incarnation}

    def since(self, mesh_uid: str) -> dict[int, int]:
        """Of each rank that was ever healed after its host was lost, the number of that loss."""
        mesh = self._records.meshes[mesh_uid]
        procs = mesh if mesh.on is None else self._records.meshes[mesh.on]
        return {rank: self._records.since(mesh, rank) for rank in {*mesh.since, *procs.since} if rank in mesh}

    def sound(self, mesh_uid: str) -> bool:
        """Whether nothing has ever happened to any rank of a mesh; needs no lock."""
        mesh = self._records.meshes.get(mesh_uid)
        return mesh is None or (mesh.ended is None and not mesh.odd)

    def check(self, mesh_uid: str, selection: Selection = None) -> MeshFailure | None:
        """What a call on these ranks must raise at once; None if all of them work, or the mesh is not known here."""
        mesh = self._records.meshes.get(mesh_uid)
        return None if mesh is None else self._records.broken(mesh, selection)

    def describe(self, mesh_uid: str, ranks: Sequence[int], cause: Cause) -> MeshFailure | None:
        """Something that happened to ranks of a mesh and failed none of them, as people are told it."""
        mesh = self._records.meshes.get(mesh_uid)
        return None if mesh is None else mesh.failure([rank for rank in ranks if rank in mesh], cause)
