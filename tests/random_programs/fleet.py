"""Meshes for random programs: slices of few processes, which stay from one program to the next."""

import math
from collections.abc import Sequence

from monarch_nb.actor import ProcMesh, this_host
from monarch_nb.distributed import Mesh
from tests.random_programs.program import NAMES

LASTS = 400  # programs that a mesh is used for: what it knows of operations grows with each


class Fleet:
    """Meshes of these shapes. Those that fit into one of the largest are slices of it."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: str = "cpu") -> None:
        self._shapes, self.device = tuple(shapes), device
        self._hosts: dict[tuple[int, ...], tuple[int, ...]] = {}  # the shape of the processes that each is a slice of
        self._procs: dict[tuple[int, ...], ProcMesh] = {}
        self._meshes: dict[tuple[int, ...], Mesh] = {}
        self._used: dict[tuple[int, ...], int] = {}
        for shape in sorted(self._shapes, key=math.prod, reverse=True):
            self._host_of(shape)

    def _host_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape not in self._hosts:
            fitting = (large for large in self._hosts.values() if _spans(shape, large) is not None)
            self._hosts[shape] = next(fitting, shape)
        return self._hosts[shape]

    def mesh(self, shape: tuple[int, ...]) -> Mesh:
        """The mesh of this shape, new where there is none."""
        used = self._used[shape] = self._used.get(shape, 0) + 1
        if used % LASTS == 0:
            self._meshes.pop(shape, None)
        if shape not in self._meshes:
            large = self._host_of(shape)
            procs = self._procs.get(large)
            if procs is None:
                names = dict(zip(NAMES, large, strict=False))
                procs = self._procs[large] = this_host().spawn_procs(names, name="x".join(map(str, large)))
                procs.initialized.get(60)
            spans = _spans(shape, large)
            assert spans is not None
            part = procs.slice(**dict(zip(NAMES, spans, strict=False)))
            self._meshes[shape] = Mesh.of(part, device=self.device)
        return self._meshes[shape]

    def renew(self, shape: tuple[int, ...]) -> None:
        """The processes of a mesh are of no use any more: its next use starts others."""
        large = self._hosts[shape]
        for small, host in self._hosts.items():
            if host == large:
                self._meshes.pop(small, None)
        procs = self._procs.pop(large, None)
        if procs is not None:
            procs.stop().get(60)

    def stop(self) -> None:
        for shape in tuple(self._hosts):
            self.renew(shape)


def _spans(shape: tuple[int, ...], large: tuple[int, ...]) -> list[int | slice] | None:
    """The part of each dimension of a large mesh that gives one of this shape; None if it does not fit."""
    spans: list[int | slice] = [0] * len(large)
    dim = len(large)
    for size in reversed(shape):
        dim -= 1
        while dim >= 0 and large[dim] < size:
            dim -= 1
        if dim < 0:
            return None
        spans[dim] = slice(0, size)
    return spans
