"""Values of ranks' own on their way between meshes on the same processes."""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from monarch_nb.tensor.failure import Failure, LostTensor

_HEADER = 16  # numbers: what is lost, or dtype, dimensions and sizes
_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)  # both ends have the same PyTorch


class Transit:
    """What one process sends to others of its group. A new generation of the group has nothing under way."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor | LostTensor] = {}  # for this process itself, by tag
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    def clear(self) -> None:
        """Forgets what was sent in a generation that is over."""
        self._kept.clear()
        self._under_way.clear()

    def send(
        self, value: torch.Tensor | LostTensor, targets: tuple[int, ...], own: int, tag: int, lends: bool = False
    ) -> None:
        """Sends a copy of a value, or word of its loss, to members of the group, of which this is number `own`.

        With `lends` it is the value itself, and for this process.
        """
        if lends:
            self._kept[tag] = value
            return
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        if not targets:
            return
        if isinstance(value, LostTensor):
            failure = value.failure
            header, data = [1, failure.number, failure.stream, failure.rank], None
        else:
            if value.dim() > _HEADER - 3:
                raise ValueError(f"a tensor of {value.dim()} dimensions is not sent to another mesh")
            data = value.detach().cpu().contiguous().clone()
            header = [0, _DTYPES.index(data.dtype), data.dim(), *data.shape]
        first = torch.tensor(header + [0] * (_HEADER - len(header)))
        for target in targets:
            if target == own:
                self._kept[tag] = value if data is None else data.clone()
                continue
            self._post(first, target, tag)
            if data is not None and data.numel():
                self._post(data.view(-1).view(torch.uint8), target, tag)

    def _post(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        self._under_way.append((dist.isend(tensor, target, tag=tag), tensor))

    def take(self, source: int, own: int, tag: int) -> torch.Tensor | LostTensor:
        """Returns what a member sends; blocks."""
        if source == own:
            return self._kept.pop(tag)
        header = torch.empty(_HEADER, dtype=torch.int64)
        dist.recv(header, source, tag=tag)
        lost, *about = header.tolist()
        if lost:
            number, stream, rank = about[:3]
            text = "what another mesh was to give is lost"
            return LostTensor(Failure(number, "to_mesh", rank, "LostInputError", text, "", stream, True))
        value = torch.empty(about[2 : 2 + about[1]], dtype=_DTYPES[about[0]])
        if value.numel():
            dist.recv(value.view(-1).view(torch.uint8), source, tag=tag)
        return value
