"""Sharded tensors in a notebook: which of them live, how the program calls them, and what cells have moved."""

from .naming import handle_type, name_of, names_of, variables
from .parts import parts_on, workers_on
from .reporter import TENSOR_REPORTER, all_streams, mesh_ranks, streams
from .table import TensorListing

__all__ = [
    "TENSOR_REPORTER",
    "TensorListing",
    "all_streams",
    "handle_type",
    "mesh_ranks",
    "name_of",
    "names_of",
    "parts_on",
    "streams",
    "variables",
    "workers_on",
]
