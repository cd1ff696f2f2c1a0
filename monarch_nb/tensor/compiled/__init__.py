"""Compiled steps, which run as one message without their Python."""
