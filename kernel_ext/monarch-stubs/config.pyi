from monarch_nb.config import *
from monarch_nb.config import __all__ as __all__
