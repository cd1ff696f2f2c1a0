from monarch_nb.lightning import *
from monarch_nb.lightning import __all__ as __all__
