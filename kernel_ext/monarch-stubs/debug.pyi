from monarch_nb.debug import *
from monarch_nb.debug import __all__ as __all__
