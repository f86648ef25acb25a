"""Training algorithms composed from relaxmpi.primitives.

Names are loaded on first use, so that only `attach` and `ddp_hook` need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaxmpi.algorithms.ad_psgd import ADPSGD
    from relaxmpi.algorithms.adamw import AdamW
    from relaxmpi.algorithms.attach_ddp import DDPHook, ddp_hook
    from relaxmpi.algorithms.attach_flags import NonFinite
    from relaxmpi.algorithms.attach_onebit import OneBitAdamOptimizer
    from relaxmpi.algorithms.attach_stats import SyncStats
    from relaxmpi.algorithms.attach_sync import Sync
    from relaxmpi.algorithms.attach_torch import attach
    from relaxmpi.algorithms.base import Algorithm, Bound, Local, Rule
    from relaxmpi.algorithms.choco import Choco, LowPrecisionDecentralized
    from relaxmpi.algorithms.decentralized import Decentralized
    from relaxmpi.algorithms.diloco import DiLoCo
    from relaxmpi.algorithms.freezing import VarianceRatio
    from relaxmpi.algorithms.local_sgd import LocalSGD
    from relaxmpi.algorithms.mixing import Order
    from relaxmpi.algorithms.onebit_adam import OneBitAdam
    from relaxmpi.algorithms.osgp import OSGP, SGP
    from relaxmpi.algorithms.qsgd import QSGD, ByteGrad
    from relaxmpi.algorithms.sgd import SGD
    from relaxmpi.algorithms.slowmo import SlowMo

__all__ = [
    "ADPSGD",
    "OSGP",
    "QSGD",
    "SGD",
    "SGP",
    "AdamW",
    "Algorithm",
    "Bound",
    "ByteGrad",
    "Choco",
    "DDPHook",
    "Decentralized",
    "DiLoCo",
    "Local",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "NonFinite",
    "OneBitAdam",
    "OneBitAdamOptimizer",
    "Order",
    "Rule",
    "SlowMo",
    "Sync",
    "SyncStats",
    "VarianceRatio",
    "attach",
    "ddp_hook",
]

_HOME = {
    "ADPSGD": "ad_psgd",
    "AdamW": "adamw",
    "Algorithm": "base",
    "Bound": "base",
    "ByteGrad": "qsgd",
    "Choco": "choco",
    "DDPHook": "attach_ddp",
    "Decentralized": "decentralized",
    "DiLoCo": "diloco",
    "Local": "base",
    "LocalSGD": "local_sgd",
    "LowPrecisionDecentralized": "choco",
    "OSGP": "osgp",
    "Order": "mixing",
    "QSGD": "qsgd",
    "Rule": "base",
    "SGD": "sgd",
    "SGP": "osgp",
    "SlowMo": "slowmo",
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
