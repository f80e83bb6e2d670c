"""Small parts: works, the registry, addresses, arguments."""
import socket
import threading

import pytest
import torch

from recover import forks
from recover.collectives import addresses, create, names
from recover.collectives.groups import _check_layout, check_number, check_pairs
from recover.collectives.work import Pending, failed
from recover.config import Timeouts
from recover.errors import PeerLost


def test_work_is_settled_once():
    work, called = Pending(), []
    work.add_done_callback(called.append)
    assert not work.done()
    with pytest.raises(TimeoutError):
        work.wait(0)
    callbacks = work.settle(5)
    assert called == []
    work.run(callbacks)
    assert work.settle(None, PeerLost("too late")) == []
    assert (work.wait(), called, work.loss) == (5, [work], None)
    work.add_done_callback(called.append)
    assert called == [work, work]


def test_work_fails_every_waiter_with_an_exception_of_its_own():
    work = failed(PeerLost("gone", 3))
    raised = []
    for _ in range(2):
        with pytest.raises(PeerLost) as caught:
            work.wait()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert (raised[0].reason, raised[0].peer) == ("gone", 3)


def test_a_broken_callback_does_not_stop_the_others(caplog):
    work, called = Pending(), []
    work.add_done_callback(lambda work: 1 / 0)
    work.add_done_callback(called.append)
    work.run(work.settle(None))
    assert called == [work]
    assert "ZeroDivisionError" in caplog.text


def test_waiters_wake():
    work = Pending()
    thread = threading.Thread(target=work.wait)
    thread.start()
    work.settle(None)
    thread.join(5)
    assert not thread.is_alive()


def test_registry():
    assert "tcp" in names()
    with pytest.raises(ValueError, match=r"choose one of .*tcp"):
        create("carrier pigeon", run_id="r", token=b"t", timeouts=Timeouts())


@pytest.mark.parametrize(("host", "toward", "expected"), [
    (None, None, "127.0.0.1"), (None, "127.0.0.1:80", "127.0.0.1"), (None, "[::1]:80", "::1"),
    (None, "no such host,127.0.0.1:1", "127.0.0.1"), ("127.0.0.2", "127.0.0.1:80", "127.0.0.2"), ("::1", None, "::1"),
    ("lo", None, "127.0.0.1"), ("localhost", None, "127.0.0.1")])
def test_addresses(host, toward, expected):
    assert addresses.choose(host, toward) in (expected, "::1" if host == "localhost" else expected)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no-such-interface0"])
def test_addresses_that_nobody_could_use(host):
    with pytest.raises(ValueError, match="address"):
        addresses.choose(host, None)


def test_ipv6_of_an_interface(tmp_path):
    table = tmp_path / "if_inet6"
    table.write_text("fe800000000000000000000000000001 04 40 20 80     eth7\n"
                     "fd000000000000000000000000000002 04 40 00 82     eth7\n")
    assert addresses._ipv6_of("eth7", table) == "fd00::2"
    assert addresses._ipv6_of("eth8", table) is None


def test_arguments():
    a, b = torch.zeros(4), torch.zeros(4)
    with pytest.raises(ValueError, match="inputs for"):
        check_pairs([a], [])
    with pytest.raises(ValueError, match="share memory"):
        check_pairs([a], [a])
    with pytest.raises(ValueError, match="its output"):
        check_pairs([a], [torch.zeros(5)])
    with pytest.raises(ValueError, match="can't sum"):
        check_pairs([a.bool()], [b.bool()])
    with pytest.raises(ValueError, match="contiguous"):
        _check_layout(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="operation number"):
        check_number(-1)


def test_a_forgotten_socket_is_forgotten_by_the_fork_guard():
    sock = forks.open_socket(socket.AF_INET)
    assert sock in forks._sockets
    forks.unregister(sock)
    assert sock not in forks._sockets
    forks.register(sock)
    count = len(forks._sockets)
    sock.close()
    del sock
    assert len(forks._sockets) == count - 1
