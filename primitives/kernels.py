"""The loops over numbers, for the CPU; `relaxmpi.cuda.kernels` has the same names.

All are serial, release the GIL, and give bytes that depend on nothing but their arguments: no
random state, no threads, additions in a fixed order, no contraction. Arrays are 1-D and
contiguous; floats are float32 (fast) or float64 (correct); payloads are uint8 of any alignment.
Whoever calls checks the arguments: see `codecs`.
"""

from relaxmpi.primitives._adam import absolute_sum, adam, is_finite, rates, square_sum
from relaxmpi.primitives._bits import pack, unpack
from relaxmpi.primitives._cast import (
    accumulate,
    leave,
    narrow_bf16,
    narrow_fp16,
    scale,
    widen_bf16,
    widen_fp16,
)
from relaxmpi.primitives._draw import random_words
from relaxmpi.primitives._minmax import dequantise_minmax, quantise_minmax
from relaxmpi.primitives._mix import drift, follow, meet, mix, pair, scaled, share, subtract
from relaxmpi.primitives._momentum import (
    gather_momentum,
    move_frozen,
    move_signed,
    sign_momentum,
)
from relaxmpi.primitives._quantise import dequantise, quantise, quantise_beside
from relaxmpi.primitives._sign import sign, sign_feedback, unsign
from relaxmpi.primitives._topk import densify, sparsify, sparsify_feedback

__all__ = [
    "absolute_sum",
    "accumulate",
    "adam",
    "densify",
    "dequantise",
    "dequantise_minmax",
    "drift",
    "follow",
    "gather_momentum",
    "is_finite",
    "leave",
    "meet",
    "mix",
    "move_frozen",
    "move_signed",
    "narrow_bf16",
    "narrow_fp16",
    "pack",
    "pair",
    "quantise",
    "quantise_beside",
    "quantise_minmax",
    "random_words",
    "rates",
    "scale",
    "scaled",
    "share",
    "sign",
    "sign_feedback",
    "sign_momentum",
    "sparsify",
    "sparsify_feedback",
    "square_sum",
    "subtract",
    "unpack",
    "unsign",
    "widen_bf16",
    "widen_fp16",
]
