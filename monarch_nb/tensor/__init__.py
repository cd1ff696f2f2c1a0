"""Sharded tensors: one logical tensor, cut over the ranks of a mesh."""
