"""Programs that measure: `make bench`, and in `compare` the same tasks on other systems, `make compare`."""
