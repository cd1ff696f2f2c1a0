"""Tensors of which each rank has a value of its own: how they are made, fetched and exchanged."""
