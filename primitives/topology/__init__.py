"""Who sends to whom with what weight: values that do not depend on the number of ranks."""

from relaxmpi.primitives.topology.base import Topology
from relaxmpi.primitives.topology.base_graph import BaseGraph
from relaxmpi.primitives.topology.builtin import (
    BipartiteExponential,
    Complete,
    Exponential,
    OnePeerExponential,
    RandomPairs,
    Ring,
    ShiftOne,
)
from relaxmpi.primitives.topology.matrix import from_matrix, from_networkx

__all__ = [
    "BaseGraph",
    "BipartiteExponential",
    "Complete",
    "Exponential",
    "OnePeerExponential",
    "RandomPairs",
    "Ring",
    "ShiftOne",
    "Topology",
    "from_matrix",
    "from_networkx",
]
