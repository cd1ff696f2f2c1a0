"""Compiled steps, which run as one message without running their Python."""
