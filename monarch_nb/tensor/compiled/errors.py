"""Exceptions and warnings about steps that cannot be compiled."""


class CompileError(RuntimeError):
    """A step cannot be compiled as it is. The text names the line, and says what to write instead."""


class CompileWarning(UserWarning):
    """A compiled step runs as if it were not: the text says why. Its results are right."""
