"""How procs are started, watched and ended by the agent of their host, and what runs in them first."""
