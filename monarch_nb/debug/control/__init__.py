"""The controller's side of the debugger: what is stopped, and commands to it."""
