"""Feeding a mesh: record batches of a query or a data set, to the ranks that work on them.

feed = Feed(query, workers, batch_size=256)    # Polars, DuckDB, pyarrow, any iterable of batches
trainers.train.call(feed).get()                # in there: `for batch in feed: batch["x"]`, a tensor
"""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names
from monarch_nb.data.feed import Feed

if TYPE_CHECKING:
    from monarch_nb.data.arrow import ArrowError
else:  # it needs NumPy
    __getattr__ = lazy_names(__name__, {"arrow": ("ArrowError",)})

__all__ = ["ArrowError", "Feed"]
