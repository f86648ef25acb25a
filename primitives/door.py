"""The door of a Comm: one thread at a time starts calls."""

from __future__ import annotations

import threading

from relaxmpi.primitives.errors import RelaxError

__all__ = ["Door"]


class Door:
    """`with door("verb"):` around a call; a second thread is refused, and both are named."""

    __slots__ = ("_lock", "_thread", "_verbs")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._verbs: list[str] = []
        self._thread = threading.current_thread()

    def __call__(self, verb: str) -> Door:
        """Enter, unless another thread is inside."""
        thread = threading.current_thread()
        if not self._lock.acquire(blocking=False):
            inside = self._verbs[-1] if self._verbs else "a call"
            raise RelaxError(
                f"thread {thread.name!r} starts {verb} while thread {self._thread.name!r} is in "
                f"{inside} on the same Comm: the ranks would see the two in different orders; "
                "give each thread a comm.dup() of its own"
            )
        self._thread = thread
        self._verbs.append(verb)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_raised: object) -> None:
        self._verbs.pop()
        self._lock.release()
