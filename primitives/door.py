"""The door of a Comm: one thread at a time starts calls."""

from __future__ import annotations

import threading

from relaxmpi.primitives.errors import RelaxError

__all__ = ["Door"]


class Door:
    """`with door("verb"):` around a call; a second thread is refused, and both are named."""

    __slots__ = ("_inside", "_lock", "_verbs")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._verbs: list[str] = []
        self._inside = threading.get_ident()

    def __call__(self, verb: str) -> Door:
        """Enter, unless another thread is inside."""
        if not self._lock.acquire(blocking=False):
            inside = self._verbs[-1] if self._verbs else "a call"
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            other, me = names.get(self._inside, "?"), threading.current_thread().name
            raise RelaxError(
                f"thread {me!r} starts {verb} while thread {other!r} is in {inside} on "
                "the same Comm: the ranks would see the two in different orders; give each thread "
                "a comm.dup() of its own"
            )
        self._inside = threading.get_ident()
        self._verbs.append(verb)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_raised: object) -> None:
        self._verbs.pop()
        self._lock.release()
