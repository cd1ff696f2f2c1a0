"""Checks machines, and advises on problems: `monarch-nb doctor`, `%monarch doctor`."""

from monarch_nb.doctor.facts import Facts, facts_of_this_machine
from monarch_nb.doctor.judgement import Check, Level, judge, summary, table
from monarch_nb.doctor.visit import legs, shut, visit, visit_endpoints, visit_known

__all__ = [
    "Check",
    "Facts",
    "Level",
    "facts_of_this_machine",
    "judge",
    "legs",
    "shut",
    "summary",
    "table",
    "visit",
    "visit_endpoints",
    "visit_known",
]
