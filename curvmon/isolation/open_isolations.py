"""Isolations of this process that are open: one thread at a time, and restored innermost first.

Each isolation saves what it replaces, so an inner one saves the replacements of the outer one. If the outer one were
restored first, the inner one would put those replacements back for good. Therefore an isolation that is closed while
inner ones are open is restored when the last of these is closed.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

from curvmon.errors import InputError


class MeasurementLock:
    """Re-entrant, like `threading.RLock`, but any thread may release it.

    A generator that holds an isolation may be closed in another thread, for example by the garbage collector.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Whether this thread has the lock now; without `blocking`, it does not wait for it."""
        with self._changed:
            while self._owner not in (None, threading.get_ident()):
                if not blocking:
                    return False
                self._changed.wait()
            self._owner = threading.get_ident()
            self._depth += 1
        return True

    def release(self) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: Any) -> None:
        self.release()


# Most of what is replaced belongs to the process (autocast, checkpoints, kernels, default dtype, random generators). If
# measurements in two threads overlapped, the second would save the replacements of the first as the originals, and
# restore them for good after the first has ended. Re-entrant, since a loss may measure as well.
one_at_a_time = MeasurementLock()


_OPEN: list[OpenIsolation] = []
"""outermost first"""
_OPEN_CHANGES = threading.Lock()
"""held while an isolation is added or restored"""


class OpenIsolation:
    """Holds the lock until its contexts are closed.

    Attributes:
        contexts: to close when the isolation ends.
        closed: to be restored as soon as no inner one is open.
    """

    def __init__(self) -> None:
        one_at_a_time.acquire()
        self.contexts = ExitStack()
        self.closed = False
        self._thread = threading.get_ident()
        with _OPEN_CHANGES:  # before anything is saved: an outer one that is closed from now on waits for this one
            _OPEN.append(self)

    def close(self) -> None:
        """Restore this isolation and those that wait for it; later, if inner ones are open.

        Raises:
            InputError: closed in another thread than opened in. The model is restored all the same.
        """
        self.closed = True
        _restore_closed()
        if threading.get_ident() != self._thread:
            raise InputError(
                "a measurement was closed in another thread than it was opened in; the model is restored, but autocast "
                "and the gradient mode of the first thread may not be: open and close it in the same thread"
            )

    def restore(self) -> None:
        try:
            if threading.get_ident() == self._thread:
                self.contexts.close()
            else:  # some contexts would put settings of their own thread into this one
                thread = threading.Thread(target=self.contexts.close)
                thread.start()
                thread.join()
        finally:
            _OPEN.remove(self)
            one_at_a_time.release()


def _restore_closed() -> None:
    """Restore the innermost isolations as long as they are closed.

    Never blocks: the garbage collector may close an isolation while another one is restored, and then the caller that
    restores the other one also restores this one.
    """
    if not (_innermost_is_closed() and _OPEN_CHANGES.acquire(blocking=False)):
        return
    try:
        if _innermost_is_closed():
            _OPEN[-1].restore()
    finally:
        _OPEN_CHANGES.release()
        _restore_closed()


def _innermost_is_closed() -> bool:
    return bool(_OPEN) and _OPEN[-1].closed
