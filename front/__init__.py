"""MPI-style primitives with system relaxations, and the training algorithms composed from them.

Importing this package starts neither MPI nor torch: names are loaded on first use.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_HOME = {
    "relaxmpi.primitives": (
        "Comm Hierarchy Work primitive "
        "allreduce reduce_scatter allgather broadcast alltoall barrier "
        "neighbor_allreduce push_sum pairwise_average SUM MEAN MAX MIN Op "
        "Codec Key Identity Cast MinMaxUInt8 Quantizer OneBit TopK ErrorFeedback "
        "DifferenceCompression DCD Bucket buckets_of "
        "Topology Complete Ring Exponential OnePeerExponential BipartiteExponential ShiftOne "
        "RandomPairs BaseGraph from_matrix from_networkx "
        "AsyncPushSum AsyncPairwise AsyncStats "
        "SimulatedWorld Network faults "
        "save load CheckpointError "
        "RelaxError MismatchError PeerTimeout PeerLeft BrokenComm NonFiniteError Deadlock"
    ).split(),
    "relaxmpi.algorithms": (
        "Algorithm Bound Rule Local SGD QSGD ByteGrad "
        "LocalSGD DiLoCo "
        "OSGP SGP Decentralized Order Choco LowPrecisionDecentralized ADPSGD SlowMo "
        "AdamW OneBitAdam OneBitAdamOptimizer VarianceRatio "
        "attach Sync SyncStats NonFinite ddp_hook DDPHook"
    ).split(),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = list(_MODULE_OF)

try:
    __version__ = version("relaxmpi")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'relaxmpi' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
