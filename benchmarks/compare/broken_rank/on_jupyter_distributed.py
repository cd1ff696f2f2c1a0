"""One rank of eight raises: what its user sees, in cells of jupyter-distributed."""

# %%
import os

from task import train_step

rank = int(os.environ["RANK"])

# %%
train_step(rank)
