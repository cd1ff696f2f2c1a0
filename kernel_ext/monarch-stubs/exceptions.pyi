from monarch_nb.exceptions import *
from monarch_nb.exceptions import __all__ as __all__
