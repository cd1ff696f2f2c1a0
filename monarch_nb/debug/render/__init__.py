"""Stopped ranks and their answers, merged over the ranks: as text and as plain data. Pure."""

from monarch_nb.debug.render.groups import FileName, Missing, StackGroup, grouped, named, pick, short, table_text
from monarch_nb.debug.render.merge import Answers, merged_variables
from monarch_nb.debug.render.picture import picture_of, values_by_rank, variables_by_rank

__all__ = [
    "Answers",
    "FileName",
    "Missing",
    "StackGroup",
    "grouped",
    "merged_variables",
    "named",
    "pick",
    "picture_of",
    "short",
    "table_text",
    "values_by_rank",
    "variables_by_rank",
]
