"""Members that die, freeze, leave, disagree or are only slow: what is particular to sockets, seen from within a member.

No time is asserted on: the failure timeout is long where the end of a stream must do (so that silence can't be what was
noticed), and short where silence must.
"""
import os
import signal
import socket
import threading
import time

import pytest
import torch

from collectives_harness import PATIENCE, form_with, make, rank_process, ranks, together, view_of
from recover import forks
from recover.errors import PeerLost
from recover.protocol.messages import Endpoint

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("name", ["tcp"])]
BIG = 5_000_000


def reduce_for_ever(child, group):
    """Say hello after each of the first operations, then go on until something happens."""
    source, output = torch.ones(BIG), torch.empty(BIG)
    for op in range(10_000):
        try:
            group.all_reduce(op, [source], [output]).wait(PATIENCE)
        except PeerLost as loss:
            child.put((loss.peer, loss.reason, bool(source.eq(1).all())))
            return
        if op < 3:
            child.put(op)


def test_killed_while_the_others_wait(name):
    """The dead one never launched; the others have, and learn of it by the end of the stream."""
    def idle(child, group):
        child.put("formed")
        child.get(100)

    def one(child, group):
        work = group.gather(1, b"")
        child.put("launched")
        with pytest.raises(PeerLost) as caught:
            work.wait(PATIENCE)
        child.put(caught.value.peer)

    backend = make(name)
    with rank_process(1, idle, name) as victim, rank_process(2, one, name) as witness:
        group = form_with(backend, 0, {1: victim, 2: witness})
        losses = []
        group.on_loss = losses.append
        work = group.gather(1, b"")
        assert (victim.get(), witness.get()) == ("formed", "launched")
        victim.signal(signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            work.wait(PATIENCE)
        assert (caught.value.peer, witness.get(), group.lost.peer) == (1, 1, 1)
        with pytest.raises(PeerLost):
            group.gather(2, b"").wait(PATIENCE)
        group.revoke()
        group.join(PATIENCE)
        backend.close()
        assert [loss.peer for loss in losses] == [1]


@pytest.mark.parametrize("attempt", range(3))
def test_killed_in_the_middle_of_a_transfer(name, attempt):
    backend = make(name)
    with rank_process(1, reduce_for_ever, name) as victim, rank_process(2, reduce_for_ever, name) as witness:
        group = form_with(backend, 0, {1: victim, 2: witness})
        source = torch.ones(BIG)
        outputs = [torch.empty(BIG) for _ in range(4)]

        def kill():
            for expected in range(attempt + 1):
                assert victim.get() == expected
            victim.signal(signal.SIGKILL)
        killer = threading.Thread(target=kill)
        killer.start()
        op = 0
        while group.lost is None:
            try:
                group.all_reduce(op, [source], [outputs[op % 4]]).wait(PATIENCE)
            except PeerLost:
                pass
            op += 1
        killer.join(PATIENCE)
        group.revoke()
        group.join(PATIENCE)
        assert source.eq(1).all()
        answer = witness.get()
        while isinstance(answer, int):
            answer = witness.get()
        assert answer[2], "the witness's input was written to"
        backend.close()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_forked_child_does_not_hide_its_parents_death(name, guarded):
    """With the guard the peer hears the end of the stream though the worker lives on; without it, it hears nothing."""
    def parent_of_worker(child, group):
        if not guarded:
            forks._sockets.clear()
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        group.gather(1, b"").wait(PATIENCE)             # the parent's own connections are as they were
        child.put(worker)
        child.get(100)

    backend = make(name)
    with rank_process(1, parent_of_worker, name) as victim:
        group = form_with(backend, 0, {1: victim})
        group.gather(1, b"").wait(PATIENCE)
        work = group.gather(2, b"")
        worker = victim.get()
        try:
            victim.signal(signal.SIGKILL)
            os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
            if guarded:
                with pytest.raises(PeerLost, match="peer 1"):
                    work.wait(PATIENCE)
            else:
                with pytest.raises(TimeoutError):
                    work.wait(1)
            os.kill(worker, 0)                          # it lived through all this
        finally:
            os.kill(worker, signal.SIGKILL)
            backend.close()


def test_forks_while_sockets_are_made(name):
    """Children forked while another thread makes and closes connections have none of them."""
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            a, b = forks.socket_pair()
            a.close()
            b.close()
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                links = [os.readlink(f"/proc/self/fd/{s.fileno()}") for s in list(forks._sockets) if s.fileno() >= 0]
                os._exit(any("socket" in link for link in links))
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join(PATIENCE)


def test_a_frozen_peer_is_lost(name):
    def idle(child, group):
        child.get(100)

    backend = make(name, failure_timeout=1)
    with rank_process(1, idle, name, failure_timeout=1) as victim:
        group = form_with(backend, 0, {1: victim})
        work = group.all_reduce(1, [torch.ones(BIG)], [torch.empty(BIG)])
        with pytest.raises(TimeoutError):
            work.wait(2)                                # alive, computing: two timeouts long nothing happens
        victim.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match="silent") as caught:
            work.wait(PATIENCE)
        assert caught.value.peer == 1
        victim.signal(signal.SIGCONT)
        backend.close()


def late(child, group):
    """Takes part in one fence once told so."""
    child.get(100)
    group.gather(1, b"").wait(PATIENCE)
    child.put("well")
    child.get(100)


def test_a_short_stop_is_harmless(name):
    backend = make(name, failure_timeout=5)
    with rank_process(1, late, name, failure_timeout=0.4) as victim:
        group = form_with(backend, 0, {1: victim})
        work = group.gather(1, b"")
        victim.signal(signal.SIGSTOP)
        time.sleep(0.8)
        victim.signal(signal.SIGCONT)
        victim.put("go on")
        work.wait(PATIENCE)
        assert victim.get() == "well"
        backend.close()


def test_nobody_takes_its_own_absence_for_the_silence_of_others(name):
    """All are stopped (a suspended host) for longer than the limit of silence: when they wake, nobody is blamed."""
    with rank_process(0, late, name, failure_timeout=0.8) as a, rank_process(1, late, name, failure_timeout=0.8) as b:
        endpoints = {0: a.get(), 1: b.get()}
        for child in (a, b):
            child.put(endpoints)
        time.sleep(0.3)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for child in (a, b):
                child.signal(number)
            time.sleep(1)
        for child in (a, b):
            child.put("go on")
        assert (a.get(), b.get()) == ("well", "well")


class Narrow:
    """A connection in between that lets through few bytes at a time."""

    def __init__(self, target: Endpoint, portion: int, pause: float) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self.listener.getsockname()[1])
        self.portion, self.pause, self.target = portion, pause, target
        self.sockets = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        inner, _ = self.listener.accept()
        outer = socket.create_connection((self.target.host, self.target.port))
        self.sockets = [inner, outer]
        for a, b in ((inner, outer), (outer, inner)):
            threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, source, target):
        try:
            while data := source.recv(self.portion):
                target.sendall(data)
                time.sleep(self.pause)
        except OSError:
            pass

    def close(self):
        for sock in (self.listener, *self.sockets):
            sock.close()


def test_a_slow_connection_that_moves_is_not_lost(name):
    """A transfer that takes many times the failure timeout, at 1.6 MB/s."""
    backends = {m: make(name, failure_timeout=0.5) for m in range(2)}
    narrow = Narrow(backends[0].endpoint, 16 << 10, 0.01)
    view = view_of({0: narrow.endpoint, 1: backends[1].endpoint})
    groups = together({m: lambda m=m: backends[m].form(view, 0, m, PATIENCE) for m in backends})
    size = 500_000
    outputs = {m: torch.empty(size) for m in backends}
    results = together({m: lambda m=m: groups[m].all_reduce(1, [torch.ones(size)], [outputs[m]]).wait(PATIENCE)
                        for m in backends})
    assert results == {0: None, 1: None}
    assert all(o.eq(2).all() for o in outputs.values())
    narrow.close()
    for backend in backends.values():
        backend.close()


def test_revoke_while_eight_wait(name):
    with ranks(2, name) as cluster:
        mine, other = cluster.groups[0], cluster.groups[1]
        losses = {0: [], 1: []}
        heard = threading.Event()
        mine.on_loss = losses[0].append
        other.on_loss = lambda loss: (losses[1].append(loss), heard.set())
        sources = [torch.full((200_000,), float(i)) for i in range(8)]
        outputs = [torch.full((200_000,), -1.0) for _ in range(8)]
        works = [mine.all_reduce(i, [sources[i]], [outputs[i]]) for i in range(8)]
        theirs = other.all_reduce(0, [sources[0].clone()], [outputs[0].clone()])
        results = []

        def wait(work):
            try:
                results.append(work.wait(PATIENCE))
            except PeerLost as loss:
                results.append(loss)
        threads = [threading.Thread(target=wait, args=(w,)) for w in works[1:]]
        for thread in threads:
            thread.start()
        theirs.wait(PATIENCE)
        mine.revoke()
        mine.revoke()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(results) == 7
        assert all(isinstance(r, PeerLost) and "revoked" in r.reason for r in results)
        mine.join(PATIENCE)
        after = [o.clone() for o in outputs]
        with pytest.raises(PeerLost):
            mine.gather(100, b"").wait(0)
        assert heard.wait(PATIENCE)
        with pytest.raises(PeerLost, match="gave up"):
            other.all_reduce(1, [sources[1].clone()], [outputs[1].clone()]).wait(PATIENCE)
        assert all(torch.equal(a, b) for a, b in zip(outputs, after, strict=True))
        assert all(s.eq(i).all() for i, s in enumerate(sources))
        assert (losses[0], [loss.peer for loss in losses[1]]) == ([], [None])


def test_loss_before_anyone_listens_is_told_later(name):
    with ranks(2, name) as cluster:
        cluster.groups[1].revoke()
        with pytest.raises(PeerLost):
            cluster.groups[0].gather(1, b"").wait(PATIENCE)
        told = threading.Event()
        cluster.groups[0].on_loss = lambda loss: told.set()
        assert told.wait(PATIENCE)


def test_disagreement_on_size_ends_both_with_both_sizes(name):
    with ranks(2, name) as cluster:
        def body(me, group):
            group.all_reduce(7, [torch.ones(10 + me)], [torch.ones(10 + me)]).wait(PATIENCE)
        for loss in cluster.each(body).values():
            assert isinstance(loss, PeerLost)
            assert "40 bytes" in str(loss)
            assert "44 bytes" in str(loss)
        cluster.form()                                  # and nothing is broken for good
        assert set(cluster.each(lambda me, group: len(group.gather(1, b"").wait(PATIENCE))).values()) == {2}


def test_going_on_after_a_loss(name):
    """Four, three, two, one: outputs of whoever stays are those of the members of each view."""
    with ranks(4, name) as cluster:
        for members in [(0, 1, 2, 3), (0, 2, 3), (0, 3), (3,)]:
            cluster.form(members)
            def body(me, group):
                outputs = [torch.empty(50_000), torch.empty(3, dtype=torch.float64)]
                inputs = [torch.full((50_000,), float(me)), torch.ones(3, dtype=torch.float64)]
                group.all_reduce(1, inputs, outputs).wait(PATIENCE)
                return outputs[0][0].item(), outputs[1][0].item()
            assert set(cluster.each(body).values()) == {(float(sum(members)), float(len(members)))}
            if len(members) > 1:                        # its connections end as if it had been killed
                victim = {4: 1, 3: 2, 2: 0}[len(members)]
                pending = {m: cluster.groups[m].gather(2, b"") for m in members if m != victim}
                cluster.backends[victim].close()
                for work in pending.values():
                    with pytest.raises(PeerLost):
                        work.wait(PATIENCE)


def test_a_peer_that_is_gone_fails_the_forming_at_once(name):
    backends = {m: make(name) for m in range(2)}
    view = view_of({m: b.endpoint for m, b in backends.items()})
    backends[0].close()
    with pytest.raises(PeerLost, match="peer 0"):
        backends[1].form(view, 0, 1, PATIENCE)
    backends[1].close()


def test_a_peer_that_does_not_come_fails_the_forming_in_time(name):
    backends = {m: make(name) for m in range(3)}
    view = view_of({m: b.endpoint for m, b in backends.items()})
    with pytest.raises(PeerLost, match=r"\[1, 2\] did not enter view"):
        backends[0].form(view, 0, 0, 0.2)
    with pytest.raises(PeerLost, match="did not enter"):
        backends[2].form(view_of({m: b.endpoint for m, b in backends.items()}, 2), 0, 2, 0.2)
    for backend in backends.values():
        backend.close()


def test_a_view_that_is_over_is_abandoned(name):
    backend = make(name)
    view = view_of({0: backend.endpoint, 1: Endpoint("127.0.0.1", 1)}, 3)
    thread = threading.Timer(0.1, lambda: backend.abandon((0, 4)))
    thread.start()
    with pytest.raises(PeerLost, match="is over"):
        backend.form(view, 0, 0, PATIENCE)
    with pytest.raises(PeerLost, match="is over"):
        backend.form(view, 0, 0, PATIENCE)
    assert backend.form(view_of({0: backend.endpoint}, 4), 0, 0, PATIENCE).members == (0,)
    backend.close()


def test_the_faster_one_waits_for_one_that_only_knows_that_the_old_view_is_over(name):
    backends = {m: make(name) for m in range(2)}
    view = view_of({m: b.endpoint for m, b in backends.items()}, 5)
    backends[0].abandon(view.id)

    def late():
        time.sleep(0.2)
        return backends[0].form(view, 0, 0, PATIENCE).members
    results = together({0: late, 1: lambda: backends[1].form(view, 0, 1, PATIENCE).members})
    assert results == {0: (0, 1), 1: (0, 1)}
    for backend in backends.values():
        backend.close()


def test_the_faster_one_waits_for_the_slower(name):
    """Whichever enters a view first, and while the other still is in the view before."""
    with ranks(2, name) as cluster:
        for first in (0, 1, 0, 1):
            cluster.number += 1
            view = view_of({m: b.endpoint for m, b in cluster.backends.items()}, cluster.number)
            entered = threading.Event()

            def enter(m, view=view, first=first, entered=entered):
                if m != first:
                    assert entered.wait(PATIENCE)
                    time.sleep(0.05)
                entered.set()
                return cluster.backends[m].form(view, 0, m, PATIENCE).gather(1, bytes([m])).wait(PATIENCE)
            results = together({m: lambda m=m, enter=enter: enter(m) for m in range(2)})
            assert results == {m: {0: b"\0", 1: b"\1"} for m in range(2)}


def test_two_hundred_views_leave_nothing_behind(name):
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    with ranks(3, name) as cluster:
        def body(me, group):
            output = torch.empty(100_000)
            group.all_reduce(1, [torch.ones(100_000)], [output]).wait(PATIENCE)
            group.gather(2, b"")                        # and one that is still pending for some when the view ends
            return output[0].item()
        for number in range(200):
            members = (0, 1, 2) if number % 2 else (0, 2)
            cluster.form(members)
            assert set(cluster.each(body).values()) == {float(len(members))}
            if number == 50:
                early, memory = held(), resident()
        cluster.form((0, 2))
        cluster.each(body)
        for _ in range(100):                            # closed connections linger until the peer has closed too
            if held() <= early:
                break
            time.sleep(0.05)
        assert held() <= early
        assert resident() - memory < 20 << 20
