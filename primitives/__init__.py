"""The low-level layer: how ranks talk."""

from relaxmpi.primitives.asynchronous.pairwise import AsyncPairwise
from relaxmpi.primitives.asynchronous.push_sum import AsyncPushSum
from relaxmpi.primitives.asynchronous.stats import AsyncStats
from relaxmpi.primitives.bucket import Bucket, buckets_of
from relaxmpi.primitives.checkpoint.load import load
from relaxmpi.primitives.checkpoint.save import save
from relaxmpi.primitives.codecs import (
    Cast,
    Codec,
    Identity,
    Key,
    MinMaxUInt8,
    OneBit,
    Quantizer,
)
from relaxmpi.primitives.comm import Comm
from relaxmpi.primitives.cpu import Cpu
from relaxmpi.primitives.devices import register
from relaxmpi.primitives.errors import (
    BrokenComm,
    CheckpointError,
    Deadlock,
    MismatchError,
    NonFiniteError,
    PeerLeft,
    PeerTimeout,
    RelaxError,
)
from relaxmpi.primitives.feedback import ErrorFeedback
from relaxmpi.primitives.gossip.difference import DCD, DifferenceCompression
from relaxmpi.primitives.gossip.verbs import neighbor_allreduce, pairwise_average, push_sum
from relaxmpi.primitives.hierarchy import Hierarchy
from relaxmpi.primitives.ops import MAX, MEAN, MIN, SUM, Op
from relaxmpi.primitives.primitive import primitive
from relaxmpi.primitives.simulation import faults
from relaxmpi.primitives.simulation.network import Network
from relaxmpi.primitives.simulation.simulated import SimulatedWorld
from relaxmpi.primitives.topk import TopK
from relaxmpi.primitives.topology import (
    BaseGraph,
    BipartiteExponential,
    Complete,
    Exponential,
    OnePeerExponential,
    RandomPairs,
    Ring,
    ShiftOne,
    Topology,
    from_matrix,
    from_networkx,
)
from relaxmpi.primitives.verbs import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    reduce_scatter,
)
from relaxmpi.primitives.work import Work

__all__ = [
    "DCD",
    "MAX",
    "MEAN",
    "MIN",
    "SUM",
    "AsyncPairwise",
    "AsyncPushSum",
    "AsyncStats",
    "BaseGraph",
    "BipartiteExponential",
    "BrokenComm",
    "Bucket",
    "Cast",
    "CheckpointError",
    "Codec",
    "Comm",
    "Complete",
    "Deadlock",
    "DifferenceCompression",
    "ErrorFeedback",
    "Exponential",
    "Hierarchy",
    "Identity",
    "Key",
    "MinMaxUInt8",
    "MismatchError",
    "Network",
    "NonFiniteError",
    "OneBit",
    "OnePeerExponential",
    "Op",
    "PeerLeft",
    "PeerTimeout",
    "Quantizer",
    "RandomPairs",
    "RelaxError",
    "Ring",
    "ShiftOne",
    "SimulatedWorld",
    "TopK",
    "Topology",
    "Work",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "buckets_of",
    "faults",
    "from_matrix",
    "from_networkx",
    "load",
    "neighbor_allreduce",
    "pairwise_average",
    "primitive",
    "push_sum",
    "reduce_scatter",
    "register",
    "save",
]

register(Cpu())
