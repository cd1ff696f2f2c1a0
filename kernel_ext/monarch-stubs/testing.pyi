from monarch_nb.testing import *
from monarch_nb.testing import __all__ as __all__
