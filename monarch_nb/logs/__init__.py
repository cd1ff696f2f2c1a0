"""What processes write, from a descriptor to a cell: journals, spools, the agent's tail, lines, options and views."""
