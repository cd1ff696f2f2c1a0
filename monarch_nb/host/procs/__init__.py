"""Starting, watching and ending processes on a host, and the first code that runs in them."""
