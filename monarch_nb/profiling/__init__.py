"""Profiles and timelines of a mesh's ranks: stacks sampled while a block runs, and PyTorch's traces in one file.

with monarch.profile(trainers) as profile:
    trainers.step.call().get()
profile                                 # differences between ranks, and a flame graph for each group of ranks
"""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.profiling.groups import Difference
    from monarch_nb.profiling.measuring import profile
    from monarch_nb.profiling.result import Profile
    from monarch_nb.profiling.timelines import Timeline, timeline

__all__ = ["Difference", "Profile", "Timeline", "profile", "timeline"]

__getattr__ = lazy_names(
    __name__,
    {
        "groups": ("Difference",),
        "measuring": ("profile",),
        "result": ("Profile",),
        "timelines": ("Timeline", "timeline"),
    },
)
