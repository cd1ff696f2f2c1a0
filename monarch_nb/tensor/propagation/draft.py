"""A program while it is written."""

from collections.abc import Sequence

from .accounting import Recorder
from .meta import Meta, Placements, contiguous, replicated
from .operation import Operation
from .plan import Call, Collective, Local, Program, Redistribute, Step, Write
from .world import World

__all__ = ["Draft"]


class Draft:
    """Steps, the metas of the registers that they fill, and the collectives that they cost."""

    def __init__(self, world: World, metas: Sequence[Meta]) -> None:
        self._imagined = world
        self._inputs = len(metas)
        self.metas = list(metas)
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []

    def register(self, meta: Meta) -> int:
        """A new register for a tensor with this meta."""
        self.metas.append(meta)
        return len(self.metas) - 1

    def redistribute(self, source: int, placements: Placements) -> int:
        """The register with the tensor placed so: the same one where it already is."""
        meta = self.metas[source]
        if meta.placements == placements:
            return source
        out = self.register(meta.placed(placements))
        keep = None if meta.stride == contiguous(meta.shape) else meta.stride
        self.steps.append(Redistribute(source, placements, out, keep))
        self.collectives += redistribution(self._imagined, meta, placements)
        return out

    def gather(self, source: int) -> int:
        """The register with the whole tensor on every rank."""
        return self.redistribute(source, replicated(self.metas[source].layout))

    def call(
        self, operation: Operation, metas: Sequence[Meta | None], collectives: Sequence[Collective]
    ) -> list[int | None]:
        """PyTorch's own sharded operation; the registers of its results."""
        out = [None if meta is None else self.register(meta) for meta in metas]
        self.steps.append(Call(operation.name, operation.args, operation.kwargs, tuple(out)))
        self.collectives += collectives
        return out

    def local(
        self, name: str, args: Sequence[object], kwargs: dict[str, object], metas: Sequence[Meta | None]
    ) -> list[int | None]:
        """An operation on each rank's own shards; the registers of its results."""
        out = [None if meta is None else self.register(meta) for meta in metas]
        self.steps.append(Local(name, tuple(args), kwargs, tuple(out), tuple(metas)))
        return out

    def write(self, target: int, source: int) -> None:
        """What is in `source`, into the memory of `target`."""
        self.steps.append(Write(target, self.redistribute(source, self.metas[target].placements)))

    def program(self, results: Sequence[int], *, seeded: tuple[int, ...] | None = None) -> Program:
        """The finished thing."""
        return Program(self._inputs, len(self.metas), tuple(self.steps), tuple(results), seeded)


def redistribution(world: World, meta: Meta, placements: Placements) -> list[Collective]:
    """What it costs to place a tensor otherwise."""
    recorder = Recorder(world.dims)
    with recorder:
        world.fake(meta).redistribute(world.mesh, placements)
    return recorder.found
