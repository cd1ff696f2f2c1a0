"""Tensors of which each rank has a value of its own: what makes, fetches and exchanges them."""
