"""Lazy compilation of the CPU kernels, with a cache on disk that many ranks may share.

The only module that imports numba. Kernels are compiled when they are first called with a
type, never on import.
"""

import contextlib
import fcntl
import hashlib
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

__all__ = ["as_float", "compiles", "inlined", "jit"]

# By name, because numba is typed in part, and which part depends on its version.
numba: Any = import_module("numba")
caching: Any = import_module("numba.core.caching")
extending: Any = import_module("numba.core.extending")
compiler_lock: Any = import_module("numba.core.compiler_lock").global_compiler_lock

P = ParamSpec("P")
R = TypeVar("R")

# Division by zero gives inf or NaN as in numpy; a test for it would also prevent vector code.
# No reference counts: each view of a bucket would cost atomic operations, a third of the time
# of a bucket of 512. So kernels allocate nothing; their callers pass scratch and keep it alive.
_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}

# Seconds that a rank waits for another one that compiles; then it compiles for itself.
LOCK_PATIENCE = 60.0


def compiles() -> bool:
    """Whether numba compiles at all: NUMBA_DISABLE_JIT=1 turns that off, for debuggers."""
    return not numba.config.DISABLE_JIT


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a helper into the kernels that call it; it has no cache entry of its own.

    Forced, because LLVM leaves large helpers as functions, which then set up their constants and
    test their arguments in every bucket: up to a quarter of the time of a kernel.
    """
    compiled: Callable[P, R] = numba.njit(**_OPTIONS, forceinline=True)(function)
    return compiled


@extending.intrinsic  # type: ignore[untyped-decorator]
def as_float(_: Any, bits: Any) -> Any:
    """The float whose bits are those of an int32 or int64: a view of one number, in a register."""
    wide = bits.bitwidth == 64
    result = numba.types.float64 if wide else numba.types.float32

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return result(bits), generate


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a kernel at its first call for each combination of argument types.

    The result is kept on disk (beside the source, or where ``NUMBA_CACHE_DIR`` says). Ranks
    of a node take turns by a file lock, so that one compiles and the others load; there is no
    barrier, because kernels run inside asynchronous verbs. A cache that cannot be read,
    written or locked costs one warning, and the process then compiles for itself.

    No fastmath: the tests for NaN stay, and products are never contracted into fused
    multiply-adds, so that the same bytes come out on every machine.
    """
    dispatcher: Any = numba.njit(**_OPTIONS)(function)
    build = dispatcher.compile

    def compile_under_lock(signature: Any) -> Any:
        # numba's own lock first: another thread may compile a caller of this kernel.
        with compiler_lock:
            if _shared.usable:
                try:
                    if isinstance(dispatcher._cache, caching.NullCache):
                        dispatcher._cache = _checked_cache(function)
                    with _shared.turn(Path(dispatcher._cache.cache_path)):
                        return build(signature)
                except numba.core.errors.NumbaError:
                    raise
                except Exception as trouble:
                    _shared.give_up(trouble)
            dispatcher._cache = caching.NullCache()
            return build(signature)

    dispatcher.compile = compile_under_lock
    kernel: Callable[P, R] = dispatcher
    return kernel


class _CheckedFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Machine code with its checksum: a damaged file is an error, not a crash."""

    def _save_data(self, name: str, data: object) -> None:
        blob = self._dump(data)
        super()._save_data(name, (hashlib.sha256(blob).digest(), blob))

    def _load_data(self, name: str) -> Any:
        digest, blob = super()._load_data(name)
        if hashlib.sha256(blob).digest() != digest:
            raise ValueError(f"checksum of {name} is wrong")
        return pickle.loads(blob)


def _checked_cache(function: Callable[..., Any]) -> Any:
    cache = caching.FunctionCache(function)
    cache._cache_file = _CheckedFile(
        cache_path=cache.cache_path,
        filename_base=cache._impl.filename_base,
        source_stamp=_sources(),
    )
    return cache


def _sources() -> bytes:
    """Digest of all kernel sources: numba alone would miss a change in a helper's file."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("_*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


class _SharedCache:
    """Whether this process still uses the cache on disk, and whose turn it is to compile."""

    def __init__(self) -> None:
        self.usable = True
        self._inside = False

    @contextlib.contextmanager
    def turn(self, folder: Path) -> Iterator[None]:
        if self._inside:  # a kernel that calls a kernel: the lock is ours already
            yield
            return
        with (folder / "relaxmpi.lock").open("a") as file:
            _lock(file.fileno())
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def give_up(self, trouble: Exception) -> None:
        self.usable = False
        warnings.warn(
            f"relaxmpi compiles its kernels without the cache on disk ({trouble!r}). Delete the "
            "cached *.nbi and *.nbc files, or set NUMBA_CACHE_DIR to a writable folder on a "
            "local disk.",
            RuntimeWarning,
            stacklevel=3,
        )


def _lock(descriptor: int) -> None:
    """Take the lock; closing the file, or the end of the process, gives it back."""
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process held the lock for {LOCK_PATIENCE} s") from None
            time.sleep(0.02)


_shared = _SharedCache()
