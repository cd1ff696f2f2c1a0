"""JupyterLab's own debugger, and that of other front ends, on the ranks of the mesh: requests of the debug adapter
protocol come to the kernel, and are answered by stopped ranks, or by the kernel's own debugger.
"""

from .bridge import DebugBridge

__all__ = ["DebugBridge"]
