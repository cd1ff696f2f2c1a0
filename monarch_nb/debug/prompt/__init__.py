"""The debugger's prompt: commands for many ranks, where people type them, and the waits that it opens in."""
