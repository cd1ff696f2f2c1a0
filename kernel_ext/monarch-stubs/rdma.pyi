from monarch_nb.rdma import *
from monarch_nb.rdma import __all__ as __all__
