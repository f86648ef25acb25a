"""Words that other processes read and write, as compiled code may use them.

A compiler may keep a plain word in a register for good, and may move plain stores about: these
loads acquire and these stores release, so that who reads a word sees all that was written before.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import extending, numba

__all__ = ["address", "give_way", "load", "store"]

Words = NDArray[np.int64]


def _address(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    made = context.make_array(array_type)(context, builder, value=array)
    return builder.gep(made.data, [at])


@extending.intrinsic  # type: ignore[untyped-decorator]
def load(_: Any, words: Any, at: Any) -> Any:
    """Return words[at]; words is a 1-D contiguous array of int64, and `at` is not checked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = _address(context, builder, signature.args[0], *args)
        return builder.load_atomic(where, "acquire", 8)

    return numba.types.int64(words, numba.types.intp), generate


@extending.intrinsic  # type: ignore[untyped-decorator]
def store(_: Any, words: Any, at: Any, value: Any) -> Any:
    """Write words[at] = value; see `load`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, at, value = args
        where = _address(context, builder, signature.args[0], array, at)
        builder.store_atomic(value, where, "release", 8)
        return context.get_dummy_value()

    return numba.types.void(words, numba.types.intp, numba.types.int64), generate


@extending.intrinsic  # type: ignore[untyped-decorator]
def address(_: Any, array: Any) -> Any:
    """Return where a contiguous array begins, as a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, value=args[0])
        return builder.ptrtoint(made.data, context.get_value_type(signature.return_type))

    return numba.types.int64(array), generate


give_way = numba.types.ExternalFunction("sched_yield", numba.types.int32())
