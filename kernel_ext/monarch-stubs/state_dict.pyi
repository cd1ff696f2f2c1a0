from monarch_nb.state_dict import *
from monarch_nb.state_dict import __all__ as __all__
