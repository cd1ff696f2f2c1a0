"""Placement of the parts of a sharded tensor as pure arithmetic, with drawings as data and text. Does not import torch.

place((1024, 1024), "float32", 4, ("data", "model"), (4, 2), [Shard(0), Replicate()])   # -> Placement
"""

from monarch_nb.tensor.placement.picture import document
from monarch_nb.tensor.placement.placement import (
    Block,
    Kind,
    Partial,
    Placement,
    Replicate,
    Shard,
    kind_of,
    place,
    shape_text,
)
from monarch_nb.tensor.placement.text import EDGE, text_of, values_document

__all__ = [
    "EDGE",
    "Block",
    "Kind",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "document",
    "kind_of",
    "place",
    "shape_text",
    "text_of",
    "values_document",
]
