"""Sharded tensors: one logical tensor, sharded over the ranks of a mesh."""
