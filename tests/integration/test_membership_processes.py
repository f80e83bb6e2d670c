"""The coordinator as a process: killed, stopped, started again; and members as processes that die or freeze."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from membership_kit import SOON, Host, Process, clean, cut, formed, make, newer, until
from recover.errors import CoordinatorLost, Evicted, RecoverError
from recover.protocol.messages import NO_VIEW

pytestmark = pytest.mark.integration

SOURCE = Path(__file__).parents[2] / "src"
TESTS = Path(__file__).parents[1]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path, 3, timeout=2.0)
    yield process
    process.close()


def events(process: Process) -> list[dict]:                                                         # type: ignore[type-arg]
    return [json.loads(line) for path in sorted((process.directory / "events").glob("*.jsonl"))
            for line in path.read_text().splitlines()]


# -- the coordinator goes -------------------------------------------------------------------------------------------
def test_killed_and_started_again_it_adopts_the_view_and_nobody_notices(process: Process) -> None:
    with formed(process.address, 3, timeout=2.0) as members:
        pushed: list[object] = []
        for member in members:
            clean(member)
            member.on_view = pushed.append
        process.kill()
        until(lambda: not any(m.connected for m in members), "all see it gone")
        assert members[0].latest.id == (0, 1)
        process.start()
        until(lambda: all(m.connected for m in members), "all are back")
        stats = members[0].stats()
        assert stats["incarnation"] == 1
        assert stats["view"] == (0, 1)
        assert stats["sent"].keys() <= {"Welcome", "Stats", "Heartbeat"}
        assert pushed == []
        cut(members[2])
        assert newer(members[:2], (0, 1)).id == (1, 1)


def test_a_death_while_it_is_away_is_handled_when_it_is_back(process: Process) -> None:
    with formed(process.address, 3, timeout=2.0) as members:
        for member in members:
            clean(member)
        process.kill()
        cut(members[1])
        members[0].suspect((0, 1), "reset", 1)
        process.start()
        survivors = [members[0], members[2]]
        view = newer(survivors, (0, 1))
        assert view.members == (0, 2)
        assert view.id[0] == 1


def test_a_suspicion_uttered_while_it_is_away_is_not_lost(process: Process) -> None:
    with formed(process.address, 3, timeout=2.0) as members:
        for member in members:
            clean(member)
        process.kill()
        until(lambda: not members[0].connected, "gone")
        members[0].suspect((0, 1), "reset")
        process.start()
        assert newer(members, (0, 1)).members == (0, 1, 2)


def test_an_exchange_in_progress_fails_and_is_repeated_in_the_new_view(process: Process) -> None:
    with formed(process.address, 3, timeout=2.0) as members, ThreadPoolExecutor(3) as pool:
        call = pool.submit(members[0].exchange, (0, 1), b"a", SOON)
        until(lambda: members[1].stats()["received"].get("Exchange") == 1, "it was sent")
        process.kill()
        with pytest.raises(CoordinatorLost):
            call.result(SOON)
        process.start()
        view = newer(members, (0, 1))                       # nobody had confirmed anything
        calls = [pool.submit(m.exchange, view.id, b"b", SOON) for m in members]
        assert all(call.result(SOON) == {0: b"b", 1: b"b", 2: b"b"} for call in calls)


def test_killed_before_the_first_view_it_forms_it_after_the_return(process: Process) -> None:
    members = [make(process.address, replica, timeout=2.0) for replica in range(3)]
    for member in members[:2]:
        member.start()
    until(lambda: members[0].connected and members[1].connected, "two have joined")
    process.kill()
    process.start()
    members[2].start()
    assert {m.wait_view(NO_VIEW, SOON).members for m in members} == {(0, 1, 2)}
    for member in members:
        member.close()


def test_an_evicted_member_that_comes_after_the_rebuild_is_told(process: Process) -> None:
    with formed(process.address, 3, timeout=2.0) as members:
        process.kill()
        until(lambda: not members[2].connected, "gone")
        members[2]._keeper._addresses = [("127.0.0.1", 1)]  # it looks at the wrong place for longer than the grace time
        process.start()
        assert newer(members[:2], (0, 1)).members == (0, 1)
        members[2]._keeper._addresses = [("127.0.0.1", process.port)]
        with pytest.raises(Evicted):
            members[2].wait_view((9, 9), SOON)


def test_a_second_address_is_tried(process: Process, tmp_path: Path) -> None:
    """It comes back elsewhere; an address that nobody listens on is in the way."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        both = f"127.0.0.1:{nobody.getsockname()[1]},{process.address}"
        with formed(both, 3, timeout=2.0) as members:
            assert members[0].latest.members == (0, 1, 2)


@pytest.mark.parametrize("seconds", [0.5, 3.5], ids=["shorter than the limits", "longer than the limits"])
def test_a_coordinator_that_is_stopped_for_a_while_has_lost_nobody(process: Process, seconds: float) -> None:
    with formed(process.address, 3, timeout=2.0) as members:
        process.signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool, pytest.raises(RecoverError if seconds < 0 else TimeoutError):
            pool.submit(members[0].wait_view, (0, 1), seconds).result(SOON)
        process.signal(signal.SIGCONT)
        until(lambda: all(m.connected for m in members), "all are connected")
        until(lambda: members[0].stats()["members"] == (0, 1, 2), "it knows them")
        cut(members[2])
        view = newer(members[:2], (0, 1))
        assert view.id == (0, 2)                            # the one after: nothing had changed before
        assert view.members == (0, 1)


# -- members as processes -------------------------------------------------------------------------------------------
CHILD = """
import sys, time, os
sys.path.insert(0, sys.argv[3])
from membership_kit import make
from recover.errors import Evicted
member = make(sys.argv[1], 1, timeout=float(sys.argv[2]))
member.start()
member.wait_view((-1, 0), 20)
worker = os.fork() if sys.argv[4] == "fork" else 1
if worker == 0:
    time.sleep(20)
    os._exit(0)
print(worker, flush=True)
try:
    member.wait_view((9, 9), 20)
except Evicted:
    print("evicted", flush=True)
"""


def child(host: Host, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, host.address, str(host.timeouts.failure_timeout), str(TESTS),
                             mode], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)})


def test_a_killed_process_is_noticed_by_its_connection_though_its_forked_child_lives() -> None:
    host = Host(2, timeout=30.0)                            # silence would take much longer than this test waits
    other = make(host.address, 0, timeout=30.0)
    other.start()
    process = child(host, "fork")
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        process.kill()
        assert other.wait_view((0, 1), SOON).members == (0,)
        os.kill(worker, 0)                                  # it does live
    finally:
        os.kill(worker, signal.SIGKILL)
        process.wait(SOON)
        other.close()
        host.close()


def test_a_frozen_process_is_dropped_and_finds_itself_evicted() -> None:
    host = Host(2, timeout=1.0)
    other = make(host.address, 0, timeout=1.0)
    other.start()
    process = child(host, "alone")
    assert process.stdout is not None
    process.stdout.readline()
    try:
        process.send_signal(signal.SIGSTOP)
        assert other.wait_view((0, 1), SOON).members == (0,)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "evicted\n"
    finally:
        process.kill()
        process.wait(SOON)
        other.close()
        host.close()


# -- the command ----------------------------------------------------------------------------------------------------
def test_a_port_in_use_is_named_and_the_exit_code_is_2(process: Process) -> None:
    second = subprocess.run([*process.command(process.port)], capture_output=True, text=True, timeout=30,
                            env={**os.environ, "PYTHONPATH": str(SOURCE)})
    assert second.returncode == 2
    assert f"can't listen on {process.address}" in second.stderr
    assert "in use" in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize(("option", "value", "text"), [
    ("--token-file", "/nonexistent", "nonexistent"), ("--listen", "nowhere", "HOST:PORT"),
    ("--replicas", "0", "at least one replica"), ("--failure-timeout", "0", "failure_timeout"),
    ("--ranks-per-replica", "0", "at least one rank")])
def test_wrong_arguments_are_named(process: Process, option: str, value: str, text: str) -> None:
    command = [*process.command(0), option, value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30,
                          env={**os.environ, "PYTHONPATH": str(SOURCE)})
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_ends_with_0_and_says_so_in_its_events(process: Process, number: signal.Signals) -> None:
    with formed(process.address, 3, timeout=2.0) as members:
        cut(members[2])
        newer(members[:2], (0, 1))
        process.signal(number)
        assert process.process.wait(SOON) == 0
        lines = events(process)
        assert [line["event"] for line in lines] == [
            "recover.coordinator.start", "recover.view.new", "recover.replica.lost", "recover.view.new",
            "recover.coordinator.end"]
        lost = lines[2]["attributes"]
        assert (lost["lost"], lost["cause"], lost["noticed_by"]) == (2, "eof", "coordinator")


def test_it_starts_without_torch() -> None:
    code = "import sys, recover.membership.coordinator as c; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=30, env={**os.environ, "PYTHONPATH": str(SOURCE)})
    assert done.returncode == 0
