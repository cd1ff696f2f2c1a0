"""Why a mesh makes no progress, or which rank holds the others up.

monarch.diagnose()                      # of all calls under way
monarch.diagnose(trainers).findings[0]  # kind, ranks, the line of your program, and a sentence
"""

from typing import TYPE_CHECKING

from monarch_nb._lazy import lazy_names

if TYPE_CHECKING:
    from monarch_nb.diagnosis.collector import diagnose
    from monarch_nb.diagnosis.findings import Diagnosis, Finding, Kind

__all__ = ["Diagnosis", "Finding", "Kind", "diagnose"]

__getattr__ = lazy_names(__name__, {"collector": ("diagnose",), "findings": ("Diagnosis", "Finding", "Kind")})
