from monarch_nb.distributed import *
from monarch_nb.distributed import __all__ as __all__
