"""Retry policy for services: graders, sandboxes and teachers on other machines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PAUSES = (1.0, 2.0)
"""Seconds before the second and the third attempt, which is the last."""
log = logging.getLogger(__name__)


def may_pass(error: Exception) -> bool:
    """Return True if ``error`` is of a connection. Errors of files have an ``errno``; those of HTTP libraries
    are OSErrors without one."""
    return isinstance(error, OSError) and (
        error.errno is None or isinstance(error, ConnectionError | TimeoutError)
    )


def retried[R](work: Callable[[], R]) -> R:
    """Return the result of a call, which is made again after an error that may pass."""
    for pause in PAUSES:
        try:
            return work()
        except Exception as error:
            if not may_pass(error):
                raise
            log.warning("a service failed, asked again in %g s: %r", pause, error)
            time.sleep(pause)
    return work()
