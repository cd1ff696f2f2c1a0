"""The data plane: `RDMABuffer` names memory; transfers are one-sided, by the best mover of the two processes.

buffer = RDMABuffer(tensor)          # in the actor that has it; send `buffer` to anybody
buffer.read_into(mine).get()         # elsewhere: its bytes, into memory there
routes()                             # which way bytes take, and how many took it
"""

from monarch_nb.rdma.buffer import RDMAAction, RDMABuffer, get_rdma_backend, is_ibverbs_available, is_rdma_available
from monarch_nb.rdma.errors import BufferDroppedError, OwnerLostError, RDMAError
from monarch_nb.rdma.parameters import ParameterSource, ParameterStore, Shard
from monarch_nb.rdma.put import Put, put
from monarch_nb.rdma.routes import RDMAReadTransferWarning, RDMATcpFallbackWarning, RDMAWriteTransferWarning
from monarch_nb.rdma.table import TransferTable, routes, transfers

__all__ = [
    "BufferDroppedError",
    "OwnerLostError",
    "ParameterSource",
    "ParameterStore",
    "Put",
    "RDMAAction",
    "RDMABuffer",
    "RDMAError",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "Shard",
    "TransferTable",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
    "put",
    "routes",
    "transfers",
]
