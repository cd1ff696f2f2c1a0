from monarch_nb.actor import *
from monarch_nb.actor import __all__ as __all__
