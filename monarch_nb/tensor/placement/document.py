"""A placement as JSON, for widgets and the panel."""

from typing import Any

import msgspec

from monarch_nb.tensor.placement.mesh_picture import mesh_drawing
from monarch_nb.tensor.placement.placement import Placement
from monarch_nb.tensor.placement.tensor_picture import tensor_drawing
from monarch_nb.tensor.placement.words import bytes_text, dimension_rows, mesh_text, title

_DESCRIBED = 1024  # blocks that are described in words


def document(placement: Placement, name: str = "") -> dict[str, Any]:
    """Drawings and texts of a placement; docs/protocol.md has the fields."""
    descriptions = [placement.describe(at, name) for at in range(min(len(placement.blocks), _DESCRIBED))]
    found: dict[str, Any] = msgspec.to_builtins(
        {
            "name": name or "Tensor",
            "title": title(placement),
            "mesh_text": mesh_text(placement.labels, placement.sizes),
            "bytes": bytes_text(placement),
            "rows": dimension_rows(placement),
            "blocks": descriptions,
            "tensor": tensor_drawing(placement, name),
            "mesh": mesh_drawing(placement),
        }
    )
    return found
