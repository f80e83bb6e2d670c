"""Members and a coordinator over loopback sockets: forming, losing, exchanging, refusing."""
from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from membership_kit import SOON, TOKEN, Host, cut, dropped, formed, make, newer, stranger, until
from recover.config import Timeouts
from recover.errors import CoordinatorLost, Evicted, JoinRefused, Stopped, ViewChanged
from recover.membership import server as server_module
from recover.membership import wire
from recover.membership.handshake import MAGIC, Caller
from recover.protocol.messages import NO_VIEW

pytestmark = pytest.mark.integration


@pytest.fixture
def host() -> Iterator[Host]:
    """A coordinator for two replicas of one rank."""
    host = Host(2)
    yield host
    host.close()


# -- views ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (3, 1), (2, 2)])
def test_a_run_forms_and_loses_a_replica(replicas: int, ranks: int) -> None:
    host = Host(replicas, ranks)
    with formed(host.address, replicas, ranks) as members:
        view = members[0].latest
        assert view.members == tuple(range(replicas))
        assert view.forming
        if replicas > 1:
            cut(members[-1])
            survivors = members[:-ranks]
            assert newer(survivors, view.id).members == tuple(range(replicas - 1))
    host.close()


def test_the_mates_of_a_dead_rank_are_evicted() -> None:
    host = Host(2, 2)
    with formed(host.address, 2, 2) as members:
        heard: list[bool] = []
        members[2].on_view = lambda view: heard.append(members[2].evicted)
        cut(members[3])
        with pytest.raises(Evicted):
            members[2].wait_view(members[2].latest.id, SOON)
        assert heard == [True]
        newer(members[:2], (0, 1))
    host.close()


def test_on_view_is_called_before_anyone_asks(host: Host) -> None:
    with formed(host.address, 2) as members:
        heard = threading.Event()
        members[0].on_view = lambda view: heard.set()
        cut(members[1])
        assert heard.wait(SOON)
        assert members[0].latest.members == (0,)


def test_a_suspicion_gives_a_view_of_the_same_members(host: Host) -> None:
    with formed(host.address, 2) as members:
        for member in members:
            member.suspect((0, 1), "reset", 1)
            member.suspect((0, 1), "reset", 1)
        assert newer(members, (0, 1)).members == (0, 1)
        stats = members[0].stats()
        assert stats["received"]["Suspect"] == 2
        assert stats["view"] == (0, 2)


def test_a_death_and_its_suspicion_are_one_view() -> None:
    host = Host(3)
    with formed(host.address, 3) as members:
        places = {place: connection for connection, place in host.registrar.where.items()}

        def both() -> None:
            host.server.heard(places[0, 0], wire.Suspect((0, 1), "reset", 2))           # the suspicion is heard first
            host.registrar.gone(places[2, 0], "eof", "closed")

        host._loop.call_soon_threadsafe(both)
        newer(members[:2], (0, 1))
        until(lambda: host.server.sent["NewView"] >= 5, "the view was pushed")
        cut(members[1])
        until(lambda: members[0].latest.members == (0,), "only one is left")
        assert members[0].latest.id == (0, 3)
    host.close()


def test_a_late_joiner_is_let_in_and_a_dead_one_replaced(host: Host) -> None:
    with formed(host.address, 2) as members:
        joiner = make(host.address, 2)
        joiner.start()
        view = joiner.wait_news(SOON)
        assert view.members == (0, 1, 2)
        joiner.entered(view.id)
        cut(joiner)
        newer(members, (0, 2))
        again = make(host.address, 2)
        again.start()
        assert again.wait_news(SOON).members == (0, 1, 2)
        again.close()


def test_sixty_four_replicas_form_and_lose_one() -> None:
    host = Host(64)
    with formed(host.address, 64) as members:
        cut(members[63])
        assert len(newer(members[:63], (0, 1)).members) == 63
    host.close()


def test_finishing_is_no_casualty(host: Host) -> None:
    with formed(host.address, 2) as members:
        members[0].finish()
        members[0].close()
        until(lambda: members[1].stats()["received"].get("Finish") == 1, "the coordinator heard it")
        until(lambda: 0 not in host.registrar.replicas, "and saw the connection end")
        assert members[1].latest.id == (0, 1)


def test_a_farewell_right_before_the_close_is_not_overtaken_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may see that we close before it comes to what was posted before."""
    host = Host(1)
    member = make(host.address, 0)
    keep_connected = member._keeper._keep_connected

    async def interrupted() -> None:
        task = asyncio.create_task(keep_connected())
        while member.latest.id == NO_VIEW:
            await asyncio.sleep(0.001)
        member.finish()
        member._closing = True
        task.cancel()

    monkeypatch.setattr(member._keeper, "_keep_connected", interrupted)
    member.start()
    member._keeper._thread.join(SOON)
    until(lambda: 0 not in host.registrar.replicas, "the coordinator saw the connection end")
    assert host.server.received["Finish"] == 1
    assert host.registrar.core.view.id == (0, 1)
    host.close()


def test_leaving_is_told_to_the_others(host: Host) -> None:
    with formed(host.address, 2) as members:
        members[0].leave()
        assert newer(members[1:], (0, 1)).members == (1,)
        members[0].close()
        assert not members[0].evicted


# -- exchange -------------------------------------------------------------------------------------------------------
def test_an_exchange_gives_everyone_all_payloads() -> None:
    host = Host(3)
    with formed(host.address, 3) as members, ThreadPoolExecutor(3) as pool:
        payloads = {member.replica: bytes([member.replica]) * 100_000 for member in members}
        calls = [pool.submit(m.exchange, (0, 1), payloads[m.replica], SOON) for m in members]
        assert all(call.result(SOON) == payloads for call in calls)
    host.close()


def test_an_exchange_is_overtaken_by_a_newer_view() -> None:
    host = Host(3)
    with formed(host.address, 3) as members, ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(m.exchange, (0, 1), b"x", SOON) for m in members[:2]]
        until(lambda: len(host.registrar.core.box) == 2, "both have sent theirs")
        cut(members[2])
        for call in calls:
            with pytest.raises(ViewChanged):
                call.result(SOON)
        calls = [pool.submit(m.exchange, (0, 2), b"y", SOON) for m in members[:2]]
        assert all(call.result(SOON) == {0: b"y", 1: b"y"} for call in calls)
    host.close()


def test_an_exchange_that_is_not_completed_ends_all_the_same(host: Host) -> None:
    with formed(host.address, 2) as members:
        with pytest.raises(TimeoutError):
            members[0].exchange((0, 1), b"x", 0.05)
        with pytest.raises(ValueError, match="too long"):
            members[0].exchange((0, 1), bytes(wire.MAX_PAYLOAD + 1), 1)


def test_a_broken_connection_fails_the_exchange_and_the_same_report_is_taken_again(host: Host) -> None:
    """The member is replaced by itself over a second connection: no loss, no new view."""
    with formed(host.address, 2) as members, ThreadPoolExecutor(1) as pool:
        call = pool.submit(members[0].exchange, (0, 1), b"a", SOON)
        until(lambda: len(host.registrar.core.box) == 1, "it has sent its part")
        keeper = members[0]._keeper
        assert keeper.link is not None
        keeper.link.last -= 1e6                            # as if the coordinator had been silent
        keeper.post(keeper.stir)
        with pytest.raises(CoordinatorLost):
            call.result(SOON)
        call = pool.submit(members[0].exchange, (0, 1), b"a", SOON)
        assert members[1].exchange((0, 1), b"b", SOON) == {0: b"a", 1: b"b"}
        assert call.result(SOON) == {0: b"a", 1: b"b"}
        assert members[0].latest.id == (0, 1)


# -- refused --------------------------------------------------------------------------------------------------------
def refused(member: object) -> str:
    member.start()                                                                              # type: ignore[attr-defined]
    with pytest.raises(JoinRefused) as caught:
        member.wait_view(NO_VIEW, SOON)                                                         # type: ignore[attr-defined]
    member.close()                                                                              # type: ignore[attr-defined]
    return str(caught.value)


def test_facts_that_differ_are_named_with_both_values(host: Host) -> None:
    with formed(host.address, 2):
        text = refused(make(host.address, 5, facts={"microbatches": 16, "seed": 0}))
        assert "microbatches" in text
        assert "16" in text
        assert "8" in text


def test_another_number_of_ranks_is_refused(host: Host) -> None:
    assert "2 ranks" in refused(make(host.address, 0, 0, 2))


def test_another_failure_timeout_than_the_coordinators_is_refused(host: Host) -> None:
    assert "the rank has 2 s, the coordinator 5 s" in refused(make(host.address, 0, timeout=2.0))


def test_a_taken_position_is_refused_after_a_while() -> None:
    host = Host(1, timeout=0.3)
    with formed(host.address, 1, timeout=0.3) as members:
        assert "taken" in refused(make(host.address, 0, timeout=0.3))
        assert members[0].latest.id == (0, 1)
    host.close()


@pytest.mark.parametrize(("token", "run_id"), [(b"another token", "test-run"), (TOKEN, "yesterday")])
def test_another_token_or_run_is_refused_and_harms_nobody(host: Host, token: bytes, run_id: str) -> None:
    with formed(host.address, 2) as members:
        stranger = make(host.address, 5, token=token, run_id=run_id, timeout=0.2)
        assert "another token, or another run" in refused(stranger)
        assert members[0].latest.id == (0, 1)


def test_facts_that_can_not_travel_are_a_mistake_at_once() -> None:
    with pytest.raises(ValueError, match="facts"):
        make("127.0.0.1:1", 0, facts={"seed": 1 << 70})
    with pytest.raises(ValueError, match="HOST:PORT"):
        make("nowhere", 0)


def test_a_coordinator_that_never_comes_is_waited_for_in_vain_only_so_long() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        member = make(f"127.0.0.1:{nobody.getsockname()[1]}", 0)
        short = type("Short", (Timeouts,), {"coordinator": 0.2})
        member._keeper._timeouts = short(failure_timeout=0.1)
        member.start()
        with pytest.raises(Stopped, match="no coordinator"):
            member.wait_view(NO_VIEW, SOON)
        member.close()


def test_a_name_that_does_not_resolve_yet_is_waited_for_and_later_resolved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """First nobody knows the name, then it is one address, then another: as where a service is moved."""
    resolve, asked, where = socket.getaddrinfo, [0], [""]

    def lookup(host: str, *arguments: object, **options: object) -> object:
        if host != "coordinator.test":
            return resolve(host, *arguments, **options)                                         # type: ignore[arg-type]
        asked[0] += 1
        if not where[0]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(where[0], *arguments, **options)                                         # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    first = Host(1)
    member = make(f"coordinator.test:{first.port}", 0)
    member.start()
    until(lambda: asked[0] >= 3, "it asks again")
    where[0] = "127.0.0.1"
    assert member.wait_view(NO_VIEW, SOON).id == (0, 1)
    second = Host(1, incarnation=1, port=first.port, host="127.0.0.2")
    where[0] = "127.0.0.2"
    first.close()
    until(lambda: member.connected and second.registrar.core.view.members == (0,), "it found the second")
    member.close()
    second.close()


# -- strangers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, os.urandom(4096), MAGIC + bytes(100)],
                         ids=["http", "zeros", "noise", "too much"])
def test_garbage_is_dropped_and_the_run_unharmed(host: Host, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with formed(host.address, 2) as members, stranger(host.address) as sock:
        sock.sendall(data)
        assert dropped(sock)
        assert members[0].stats()["view"] == (0, 1)
    assert "dropped a stranger" in caplog.text


def authenticated(address: str) -> socket.socket:
    sock, caller = stranger(address), Caller(TOKEN, "test-run")
    sock.sendall(caller.hello)
    while not caller.passed:
        shown = caller.feed(sock.recv(1024))
    sock.sendall(shown)
    return sock


@pytest.mark.parametrize("frame", [
    (wire.MAX_FRAME + 1).to_bytes(4, "big"),
    (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
    wire.encode(wire.Exchange((0, 1), b"x")),               # before it joined
    wire.encode(wire.Welcome(0)),
], ids=["oversized", "no msgpack", "out of turn", "wrong way"])
def test_an_offence_behind_the_handshake_is_dropped_too(host: Host, frame: bytes,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    with formed(host.address, 2) as members, authenticated(host.address) as sock:
        sock.sendall(frame)
        assert dropped(sock)
        assert members[0].stats()["view"] == (0, 1)
    assert "dropped a stranger" in caplog.text


@pytest.mark.parametrize("said", [b"", MAGIC, b"all of it"], ids=["nothing", "half", "handshake only"])
def test_a_slow_stranger_is_dropped(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(1, timeout=0.3)
    with formed(host.address, 1, timeout=0.3) as members:
        sock = authenticated(host.address) if said == b"all of it" else stranger(host.address)
        if said != b"all of it":
            sock.sendall(said)
        assert dropped(sock)
        sock.close()
        assert members[0].latest.id == (0, 1)
    host.close()
    assert "dropped a stranger" in caplog.text


def test_many_idle_strangers_do_not_keep_members_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 4)
    host = Host(2)
    idle = [stranger(host.address) for _ in range(16)]
    room = 4 + 3 * 2                                    # and as many as the run has connections
    until(lambda: len(host.server._strangers) == room and host.server._turned_away, "the others were displaced")
    with formed(host.address, 2) as members:
        assert members[0].latest.members == (0, 1)
    for sock in idle:
        sock.close()
    host.close()


# -- silence --------------------------------------------------------------------------------------------------------
def test_a_silent_member_is_lost_and_told_so_when_it_speaks_again() -> None:
    host = Host(2, timeout=0.5)
    with formed(host.address, 2, timeout=0.5) as members:
        released = threading.Event()
        members[1]._keeper.post(lambda: released.wait(SOON) and None)      # its thread is held up: no heartbeats
        assert newer(members[:1], (0, 1)).members == (0,)
        released.set()
        with pytest.raises(Evicted):
            members[1].wait_view((9, 9), SOON)
    host.close()


def test_a_member_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from recover.membership import connection
    monkeypatch.setattr(connection, "MAX_QUEUE", 1 << 20)
    host = Host(2, timeout=60.0)                            # silence does not come into it
    with formed(host.address, 2, timeout=60.0) as members:
        released = threading.Event()
        members[1]._keeper.post(lambda: released.wait(SOON) and None)
        victim = next(c for c, place in host.registrar.where.items() if place == (1, 0))
        part = wire.encode(wire.Parts((0, 1), bytes(wire.MAX_PAYLOAD)))
        host._loop.call_soon_threadsafe(victim.write, part * 40, "Parts", 40)
        assert newer(members[:1], (0, 1)).members == (0,)
        released.set()
    host.close()


def test_a_failure_free_run_sends_heartbeats_only() -> None:
    host = Host(2, timeout=0.2)
    with formed(host.address, 2, timeout=0.2) as members:
        until(lambda: len(host.registrar.lifelines) == 4, "the lifelines are there")
        before = members[0].stats()
        enough = before["received"].get("Heartbeat", 0) + 20
        until(lambda: host.server.received["Heartbeat"] > enough, "heartbeats flow")
        after = members[0].stats()
        received = {k: n - before["received"].get(k, 0) for k, n in after["received"].items()}
        sent = {k: n - before["sent"].get(k, 0) for k, n in after["sent"].items()}
        assert received.pop("Heartbeat") > 20
        assert sent.pop("Heartbeat") > 20
        assert {k: n for k, n in received.items() if n} == {"StatsRequest": 1}
        assert {k: n for k, n in sent.items() if n} == {"Stats": 1}
        assert after["resident"] > 1 << 20
        assert members[1].latest.id == (0, 1)
    host.close()


def test_closing_is_quick_and_ends_waits(host: Host) -> None:
    member = make(host.address, 0)
    member.start()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(member.wait_view, NO_VIEW, SOON)
        until(lambda: member.connected, "it joined")
        member.close()
        with pytest.raises(Stopped):
            call.result(SOON)
    assert not member._keeper._thread.is_alive()
