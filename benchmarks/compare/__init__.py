"""Five small programs, written for each of six systems, and what came of them: `make compare`."""
