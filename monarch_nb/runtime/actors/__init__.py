"""The actors of a process: how they are spawned and executed, and how they end."""
