"""A network in memory, on a virtual clock."""
