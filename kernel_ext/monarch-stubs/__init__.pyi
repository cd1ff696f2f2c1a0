from monarch_nb import *
from monarch_nb import __all__ as __all__
from monarch_nb import __version__ as __version__
from monarch_nb import load_ipython_extension as load_ipython_extension
from monarch_nb import unload_ipython_extension as unload_ipython_extension
