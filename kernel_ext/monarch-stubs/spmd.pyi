from monarch_nb.spmd import *
from monarch_nb.spmd import __all__ as __all__
