from monarch_nb.data import *
from monarch_nb.data import __all__ as __all__
