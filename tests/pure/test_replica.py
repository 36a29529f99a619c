"""The thread in which calls to servers run: pending calls when the engine is closed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import NoReturn

import pytest

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.engines.replica import HttpLoop


def test_nobody_waits_for_a_call_that_a_close_cuts_off():
    io = HttpLoop({})
    call = io.start(asyncio.sleep(60))
    io.close()
    with pytest.raises(CancelledError):
        call.result(timeout=5)


def test_a_closed_engine_refuses_calls():
    io = HttpLoop({})
    io.close()
    with pytest.raises(EngineError, match="was closed"):
        io.start(asyncio.sleep(0))


def test_a_call_that_meets_a_close_ends_or_is_refused():
    """Either thread may come first."""
    for _ in range(20):
        io, met = HttpLoop({}), threading.Event()
        closing = threading.Thread(target=lambda io=io, met=met: (met.wait(), io.close()))
        closing.start()
        with pytest.raises((EngineError, CancelledError)):
            call_until_refused(io, met)
        closing.join()


def call_until_refused(io: HttpLoop, met: threading.Event) -> NoReturn:
    while True:
        io.start(asyncio.sleep(0)).result(timeout=5)
        met.set()
