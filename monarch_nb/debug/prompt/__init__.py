"""The debugger's prompt: commands for many ranks, where people type them, and the waits that it opens in."""

from monarch_nb.debug.prompt.conversation import NoPrompt, NothingToAsk, Terminal, converse
from monarch_nb.debug.prompt.prompt import DebugPrompt
from monarch_nb.debug.prompt.waits import WaitPrompt, attend

__all__ = ["DebugPrompt", "NoPrompt", "NothingToAsk", "Terminal", "WaitPrompt", "attend", "converse"]
