"""Compiled steps: a step whose operations are known is one message, and its Python does not run."""
