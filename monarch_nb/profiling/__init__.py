"""Where the ranks of a mesh spend their time: stacks sampled while a block runs, and PyTorch's traces as one timeline.

with monarch.profile(trainers) as profile:
    trainers.step.call().get()
profile                                 # what differs between ranks, and a flame graph for each group of them
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
