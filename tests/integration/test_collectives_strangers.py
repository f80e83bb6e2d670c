"""The tcp backend's port, seen from outside: whoever does not belong to the run is dropped, and the run is unharmed."""
import os
import re
import socket
import struct
import threading
import time

import pytest
import torch

from collectives_harness import PATIENCE, TOKEN, make, ranks, together, view_of
from recover.collectives import door, frames, handshake
from recover.collectives.frames import Kind
from recover.collectives.handshake import Hello
from recover.errors import PeerLost

pytestmark = pytest.mark.integration


def connect(endpoint) -> socket.socket:
    return socket.create_connection((endpoint.host, endpoint.port), PATIENCE)


def read(sock, count) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def greet(endpoint, hello, token=TOKEN) -> socket.socket:
    """The caller's side of the handshake, by hand."""
    sock = connect(endpoint)
    talk = handshake.call(token, hello)
    said, wanted = next(talk)
    while True:
        sock.sendall(said)
        try:
            said, wanted = talk.send(read(sock, wanted))
        except StopIteration:
            return sock


def impostor(backend, frame):
    """Form a view of two with a hand-made member 1, which then sends `frame`; what the group says to it."""
    view = view_of({0: backend.endpoint, 1: backend.endpoint})
    socks = []
    formed = together({
        0: lambda: backend.form(view, 0, 0, PATIENCE),
        1: lambda: socks.append(greet(backend.endpoint, Hello("test", view.id, 0, 1, 0)))})
    work = formed[0].gather(1, b"")
    read(socks[0], len(frames.pack_post(VIEW, 1, frames.Post(frames.What.GATHER, 1, 0, 0))))    # it has started
    socks[0].sendall(frame)
    with pytest.raises(PeerLost) as caught:
        work.wait(PATIENCE)
    socks[0].close()
    return caught.value


VIEW = (0, 1)


@pytest.mark.parametrize(("frame", "reason"), ids=lambda value: value if isinstance(value, str) else "", argvalues=[
    (frames.pack((0, 0), Kind.ALIVE), r"frame of view \(0, 0\) in view \(0, 1\)"),
    (frames.pack(VIEW, Kind.DATA, 1 << 31), "no member sends that"),
    (frames.pack(VIEW, Kind.DATA, 100, op=5), "not started here"),
    (frames.pack(VIEW, Kind.DATA, 100, op=1), "no place for 100 bytes"),
    (bytes(range(200)), "no member sends that"),
    (frames.pack_post(VIEW, 1, frames.Post(frames.What.GATHER, 1, 1 << 40, 0)), "gather of 1099511627776 bytes"),
    (frames.pack_post(VIEW, 9, frames.Post(frames.What.GATHER, 1, 60_000, 0))
     + (frames.pack(VIEW, Kind.DATA, 60_000, op=9) + bytes(60_000)) * 40, "not started here"),
])
def test_frames_that_no_member_sends_end_the_group(frame, reason):
    backend = make()
    loss = impostor(backend, frame)
    assert loss.peer == 1
    assert re.search(reason, loss.reason), loss.reason
    assert len(backend.form(view_of({0: backend.endpoint}, 2), 0, 0, PATIENCE).gather(1, b"").wait(PATIENCE)) == 1
    backend.close()


def dropped(sock) -> bool:
    sock.settimeout(PATIENCE)
    try:
        while sock.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("garbage", [
    b"GET / HTTP/1.1\r\n\r\n", os.urandom(10_000), struct.pack("<8sH", handshake.MAGIC, 65535) + bytes(70_000)])
def test_garbage_at_the_port(garbage, caplog):
    with ranks(2) as cluster:
        for backend in cluster.backends.values():
            sock = connect(backend.endpoint)
            try:
                sock.sendall(garbage)
            except OSError:
                pass
            assert dropped(sock)
            sock.close()
        assert "not a greeting" in caplog.text
        assert set(cluster.each(lambda me, group: len(group.gather(1, b"").wait(PATIENCE))).values()) == {2}


def test_slow_strangers_are_bounded_in_number_and_time():
    with ranks(2, failure_timeout=1.0) as cluster:
        endpoint = cluster.backends[0].endpoint
        crowd = [connect(endpoint) for _ in range(3 * door.STRANGERS)]
        assert dropped(crowd[0])                        # crowded out, or out of time
        cluster.form()
        assert set(cluster.each(lambda me, group: len(group.gather(1, b"").wait(PATIENCE))).values()) == {2}
        assert all(dropped(sock) for sock in crowd)
        for sock in crowd:
            sock.close()


def test_another_token_and_another_run_do_not_meet(caplog):
    for other in (make(token=b"another"), make(run_id="yesterday")):
        ours = make(failure_timeout=1.0)
        view = view_of({0: ours.endpoint, 1: other.endpoint})
        results = together({0: lambda ours=ours, view=view: ours.form(view, 0, 0, 0.5),
                            1: lambda other=other, view=view: other.form(view, 0, 1, 0.5)})
        assert all(isinstance(r, PeerLost) for r in results.values())
        ours.close()
        other.close()
    assert "yesterday" in caplog.text


@pytest.mark.parametrize("hello", [
    Hello("test", (0, 2), 0, 1, 0), Hello("test", (0, 3), 1, 1, 0), Hello("test", (0, 3), 0, 1, 7),
    Hello("test", (0, 3), 0, 9, 0), Hello("test", (0, 3), 0, 0, 0)])
def test_a_member_of_an_old_view_or_in_the_wrong_place_is_dropped(hello):
    """It knows the token, but means another view, position or member than the rank that waits for its peer."""
    backend, right = make(), Hello("test", (0, 3), 0, 1, 0)
    view = view_of({0: backend.endpoint, 1: backend.endpoint}, 3)
    forming = threading.Thread(target=lambda: backend.form(view, 0, 0, PATIENCE))
    forming.start()
    for _ in range(1000):                               # until it has begun: only then it knows what to refuse
        if backend._newest == (0, 3):
            break
        time.sleep(0.01)
    with pytest.raises(OSError, match=r"closed|reset"):
        greet(backend.endpoint, hello)
    assert forming.is_alive()
    sock = greet(backend.endpoint, right)
    forming.join(PATIENCE)
    assert not forming.is_alive()
    with pytest.raises(OSError, match=r"closed|reset"):  # formed: nobody takes the place of a member
        greet(backend.endpoint, right)
    assert backend._engine.lost is None
    sock.close()
    backend.close()


def test_early_ones_wait_in_bounded_number(monkeypatch):
    """Proven connections for views that this rank has not entered: the oldest goes when there are too many."""
    from recover.collectives import tcp
    monkeypatch.setattr(tcp, "PARKED", 4)
    backend = make()
    socks, threads = [], []
    for number in range(5, 11):
        thread = threading.Thread(target=lambda n=number: _quietly(
            lambda: socks.append(greet(backend.endpoint, Hello("test", (0, n), 0, 1, 0)))))
        thread.start()
        threads.append(thread)
    threads[0].join(PATIENCE)
    assert len(backend._parked) <= 4
    backend.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def _quietly(function):
    try:
        function()
    except OSError:
        pass


@pytest.mark.parametrize("host", ["::1", "127.0.0.2", "lo"])
def test_addresses_of_every_kind(host):
    with ranks(2, host=host) as cluster:
        assert {b.endpoint.host for b in cluster.backends.values()} == {"127.0.0.1" if host == "lo" else host}
        def body(me, group):
            output = torch.empty(1000)
            group.all_reduce(1, [torch.ones(1000)], [output]).wait(PATIENCE)
            return output[0].item()
        assert set(cluster.each(body).values()) == {2.0}


def test_one_endpoint_serves_one_address():
    backend = make(host="127.0.0.3")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.4", backend.endpoint.port), PATIENCE)
    backend.close()
    backend.close()
    with pytest.raises(PeerLost, match="closed"):
        backend.form(view_of({0: backend.endpoint}), 0, 0, 1)
    with pytest.raises(ValueError, match="can't accept connections"):
        make(host="192.0.2.1")
