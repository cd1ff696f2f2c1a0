"""The built-in views."""

from .curves import METRICS
from .debugger import DEBUG
from .displays import FAILURES
from .histories import HISTORY
from .lines import LOGS
from .live import LiveViews
from .meshes import MESH
from .panel import PANEL
from .tensors import TENSORS
from .timelines import VIEW as TIMELINE
from .transfers import TRANSFERS

VIEWS = LiveViews((MESH, FAILURES, LOGS, HISTORY, METRICS, DEBUG, TENSORS, TIMELINE, TRANSFERS, PANEL))
register, unregister = VIEWS.register, VIEWS.unregister
