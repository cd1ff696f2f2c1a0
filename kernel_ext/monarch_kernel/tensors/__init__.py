"""Sharded tensors in a notebook: which of them live, how the program calls them, and what cells have moved."""

from .naming import handle_type, name_of, names_of, variables
from .parts import parts_on, workers_on
from .table import Tensors
from .telling import TELLING, all_streams, place_of, streams

__all__ = [
    "TELLING",
    "Tensors",
    "all_streams",
    "handle_type",
    "name_of",
    "names_of",
    "parts_on",
    "place_of",
    "streams",
    "variables",
    "workers_on",
]
