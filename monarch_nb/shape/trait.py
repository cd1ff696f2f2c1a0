"""The operations of all meshes on their dimensions."""

from collections.abc import Sequence
from typing import Any, Self, SupportsIndex

from monarch_nb.shape.ndslice import UnknownLabelError, known_dims

from .ndslice import NDSlice
from .region import Extent, Region, Selector, Shape


class _RegionShape:
    """The shape of a mesh: that of its region, or the one that a program of torchmonarch sets as an attribute."""

    def __get__(self, mesh: Any, owner: type) -> Shape:
        return Shape.of(mesh._region)  # no property, which objects cannot replace


class MeshTrait:
    """Slicing and reshaping by name, for anything that has a region.

    All of it is local arithmetic: it sends nothing, does not wait, and keeps the members, objects or processes.
    A subclass has `_region` and `_new_with_region`, or, as in torchmonarch, `_labels`, `_ndslice`, `_new_with_shape`.
    """

    @property
    def _region(self) -> Region:
        """The region of this mesh."""
        if type(self)._labels is MeshTrait._labels:
            raise NotImplementedError(f"{type(self).__name__} has neither _region nor _labels and _ndslice")
        return Region(self._labels, self._ndslice)

    def _new_with_region(self, region: Region) -> Self:
        """Returns a mesh of the same kind over some of the same base ranks."""
        if type(self)._new_with_shape is MeshTrait._new_with_shape:
            raise NotImplementedError(f"{type(self).__name__} has neither _new_with_region nor _new_with_shape")
        return self._new_with_shape(Shape.of(region))

    def _new_with_shape(self, shape: Shape) -> Self:
        return self._new_with_region(shape.region)

    @property
    def _ndslice(self) -> NDSlice:
        return self._region.ndslice

    _shape = _RegionShape()

    @property
    def _labels(self) -> tuple[str, ...]:
        return tuple(self._region.labels)

    def slice(self, /, **dims: Selector) -> Self:
        """Returns the part at an index (drops the dimension) or slice (keeps it) of some dimensions.

        `mesh.slice(hosts=0, gpus=slice(2, 6))`. TypeError on an unknown dimension, IndexError on an index that is
        negative or too large, ValueError on an empty slice.
        """
        return self._new_with_region(self._region.sliced(**dims))

    def split(self, /, **splits: Sequence[str] | SupportsIndex) -> Self:
        """Returns the same members with dimensions split: `mesh.split(hosts=('dp', 'pp'), pp=16)`.

        One size of each split may be omitted and is computed. ValueError when sizes do not fit, names clash, or a
        size is for no new dimension.
        """
        return self._new_with_region(self._region.split(**splits))

    def flatten(self, name: str) -> Self:
        """Returns the same members along a single dimension. ValueError unless their ranks are contiguous."""
        return self._new_with_region(self._region.flatten(name))

    def rename(self, /, **names: str) -> Self:
        """Returns the same members with other names for some dimensions: `mesh.rename(hosts='dp')`."""
        return self._new_with_region(self._region.rename(**names))

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Returns the size of one dimension, or the product of several or (by default) all. Raises KeyError."""
        region = self._region
        for name in () if dim is None else (dim,) if isinstance(dim, str) else dim:
            if name not in region.extent:
                raise UnknownLabelError(
                    f"{type(self).__name__} does not have dimension {name!r}; {known_dims(region.labels)}"
                )
        return region.size(dim)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension by name, outermost first."""
        return self._region.sizes

    @property
    def extent(self) -> Extent:
        """The named sizes."""
        return self._region.extent

    def __len__(self) -> int:
        return len(self._region)
