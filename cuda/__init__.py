"""GPU transports and kernels for the verbs of relaxmpi.primitives."""

if __name__ == "cuda":
    # With the checkout on sys.path this folder would hide NVIDIA's `cuda` namespace,
    # which CuPy and numba-cuda import: become one more portion of it instead.
    import pkgutil

    __path__ = pkgutil.extend_path(__path__, __name__)
