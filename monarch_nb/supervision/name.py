"""Names of meshes that tell two meshes of one name apart."""

from typing import Self


class MeshName(str):
    """The name a mesh was spawned with. Equal to that text, but not to the name of another mesh called the same."""

    uid: str

    def __new__(cls, text: str, uid: str) -> Self:
        """The name `text` of the mesh `uid`."""
        name = super().__new__(cls, text)
        name.uid = uid
        return name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MeshName):
            return self.uid == other.uid
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> "tuple[type[MeshName], tuple[str, str]]":
        return MeshName, (str(self), self.uid)
