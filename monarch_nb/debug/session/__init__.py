"""The debugger of one thread, in the process whose thread it stops."""
