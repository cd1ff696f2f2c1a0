from monarch_nb.job import *
from monarch_nb.job import __all__ as __all__
