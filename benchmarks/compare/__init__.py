"""Five small programs, written for each of six systems, and their results: `make compare`."""
