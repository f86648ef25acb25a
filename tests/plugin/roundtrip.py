"""A codec there and back, into memory that is not zero before."""

import numpy as np


def encoded(codec, x, **keywords):
    payload = np.full(codec.nbytes(x.size, x.dtype), 0xA5, np.uint8)
    codec.encode(x, payload, **keywords)
    return payload


def decoded(codec, payload, like):
    out = np.full_like(like, np.nan)
    codec.decode(payload, out)
    return out


def through(codec, x, **keywords):
    return decoded(codec, encoded(codec, x, **keywords), x)
