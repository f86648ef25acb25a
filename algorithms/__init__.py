"""Training algorithms composed from relaxmpi.primitives.

Names are loaded on first use, so that only `attach` and `ddp_hook` need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaxmpi.algorithms.adamw import AdamW
    from relaxmpi.algorithms.attach_ddp import DDPHook, ddp_hook
    from relaxmpi.algorithms.attach_flags import NonFinite
    from relaxmpi.algorithms.attach_onebit import OneBitAdamOptimizer
    from relaxmpi.algorithms.attach_stats import SyncStats
    from relaxmpi.algorithms.attach_sync import Sync
    from relaxmpi.algorithms.attach_torch import attach
    from relaxmpi.algorithms.base import Algorithm, Bound, Local, Rule
    from relaxmpi.algorithms.freezing import VarianceRatio
    from relaxmpi.algorithms.onebit_adam import OneBitAdam
    from relaxmpi.algorithms.qsgd import QSGD, ByteGrad
    from relaxmpi.algorithms.sgd import SGD

__all__ = [
    "QSGD",
    "SGD",
    "AdamW",
    "Algorithm",
    "Bound",
    "ByteGrad",
    "DDPHook",
    "Local",
    "NonFinite",
    "OneBitAdam",
    "OneBitAdamOptimizer",
    "Rule",
    "Sync",
    "SyncStats",
    "VarianceRatio",
    "attach",
    "ddp_hook",
]

_HOME = {
    "AdamW": "adamw",
    "Algorithm": "base",
    "Bound": "base",
    "ByteGrad": "qsgd",
    "DDPHook": "attach_ddp",
    "Local": "base",
    "QSGD": "qsgd",
    "Rule": "base",
    "SGD": "sgd",
    "NonFinite": "attach_flags",
    "OneBitAdam": "onebit_adam",
    "OneBitAdamOptimizer": "attach_onebit",
    "VarianceRatio": "freezing",
    "Sync": "attach_sync",
    "SyncStats": "attach_stats",
    "attach": "attach_torch",
    "ddp_hook": "attach_ddp",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
