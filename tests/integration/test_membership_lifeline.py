"""Lifelines: the end of a process is noticed though its connection to the coordinator stays open."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from membership_kit import SOON, Host, make, until

pytestmark = pytest.mark.integration

TESTS, SOURCE = Path(__file__).parents[1], Path(__file__).parents[2] / "src"

# A fork that Python does not know of: the child keeps a copy of every descriptor in the process's table.
CHILD = """
import ctypes, os, sys, threading, time
sys.path.insert(0, sys.argv[2])
from membership_kit import make
from recover.membership import lifeline
if sys.argv[3] == "without":
    lifeline.own_tables = lambda: None
member = make(sys.argv[1], 1, timeout=30.0)
member.start()
member.wait_view((-1, 0), 20)
sys.stdin.readline()
worker = ctypes.CDLL(None).fork()
if worker == 0:
    ctypes.CDLL(None).sleep(30)
    os._exit(0)
os.write(1, b"%d\\n" % worker)
time.sleep(30)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads with descriptor tables of their own")
@pytest.mark.parametrize("how", ["with", "without"])
def test_a_death_is_noticed_before_the_connection_ends(how: str) -> None:
    host = Host(2, timeout=30.0)                            # silence would take much longer than this test waits
    other = make(host.address, 0, timeout=30.0)
    other.start()
    process = subprocess.Popen([sys.executable, "-c", CHILD, host.address, str(TESTS), how], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)})
    assert process.stdin is not None
    assert process.stdout is not None
    worker = 0
    try:
        expected = 4 if how == "with" else 2                # of both processes
        until(lambda: len(host.registrar.lifelines) == expected, "the lifelines are there", 20)
        process.stdin.write("\n")
        process.stdin.flush()
        worker = int(process.stdout.readline())
        process.kill()
        process.wait(SOON)
        if how == "with":
            assert other.wait_view((0, 1), SOON).members == (0,)
        else:                                               # that is what they are for
            with pytest.raises(TimeoutError):
                other.wait_view((0, 1), 1.0)
    finally:
        process.kill()
        if worker:
            os.kill(worker, signal.SIGKILL)
        other.close()
        host.close()


def test_its_threads_keep_nothing_else_open() -> None:
    """The other end of a pipe sees its end of stream, whenever a lifeline's thread was started."""
    reading, writing = os.pipe()
    host = Host(1)
    member = make(host.address, 0)
    try:
        member.start()
        until(lambda: len(host.registrar.lifelines) == 2, "the lifelines are there")
        os.close(writing)
        os.set_blocking(reading, False)
        assert os.read(reading, 1) == b""                   # BlockingIOError: somebody has it open
    finally:
        os.close(reading)
        member.close()
        host.close()
