"""Members that die, freeze, are cut off, disagree or leave, as real processes, for every backend that is registered.

Each injection is proven to have happened (a member's result is `Died` or FROZEN, a flag says in which state it was), and each
test has its control: the same without the injection, where nothing may be lost. No time is asserted on: the failure
timeout is long where the end of a process must be noticed (so that silence can't be what was), short where silence must.
"""
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch

from collectives_harness import PATIENCE
from collectives_processes import FROZEN, Died, backends, die, freeze, processes, shared_event
from recover.errors import PeerLost
from recover.protocol.messages import View

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("name", backends())]
KILLED = Died(signal.SIGKILL)
BIG = 5_000_000


def outcome(work):
    """None, or the PeerLost that `wait` raised."""
    try:
        work.wait(PATIENCE)
    except PeerLost as loss:
        return loss
    return None


def sums_are_right(cluster) -> None:
    """The newest view works, and its numbers are its own."""
    def body(me, group):
        inputs = [torch.full((50_000,), float(me)), torch.ones(3, dtype=torch.float64)]
        outputs = [torch.empty_like(t) for t in inputs]
        group.all_reduce(1, inputs, outputs).wait(PATIENCE)
        fence = group.gather(2, bytes([me])).wait(PATIENCE)
        return outputs[0].unique().tolist(), outputs[1].unique().tolist(), sorted(fence)
    members = [m for m in cluster.members if m in cluster.alive]
    expected = ([float(sum(members))], [float(len(members))], members)
    assert cluster.each(body) == dict.fromkeys(members, expected)


@pytest.mark.parametrize("inject", [True, False])
def test_killed_before_it_launches(name, inject):
    waiting = shared_event()
    with processes(3, name) as cluster:
        def body(me, group):
            if me == 1:
                assert waiting.wait(PATIENCE)
                if inject:
                    die()
            losses, told = [], threading.Event()
            group.on_loss = lambda loss: (losses.append(loss.peer), told.set())
            work = group.gather(1, b"")
            if me == 2:
                waiting.set()
            loss = outcome(work)
            if loss is None:
                return None
            assert told.wait(PATIENCE)
            again = outcome(group.gather(2, b""))
            group.revoke()
            group.join(PATIENCE)
            return loss.peer, again.peer, group.lost.peer, losses
        results = cluster.each(body)
        if not inject:
            assert results == {0: None, 1: None, 2: None}
            return
        assert results == {0: (1, 1, 1, [1]), 1: KILLED, 2: (1, 1, 1, [1])}
        cluster.form()
        sums_are_right(cluster)


def transfer(name, victims) -> bool:
    """A sum of four in which `victims` die, each when it has some of its result and not all. What must hold then is
    asserted; gives back whether they were in time, and a survivor failed (a victim may have given all that it owed)."""
    middle = {victim: shared_event() for victim in victims}
    with processes(4, name) as cluster:
        def body(me, group):
            sys.setswitchinterval(1e-4)                 # a victim must see soon what its communication thread has done
            source, output = torch.full((BIG,), me + 1.0), torch.full((BIG,), -1.0)
            some = output[::BIG // 500]
            work = group.all_reduce(1, [source], [output])
            if me in victims:
                while not some.ne(-1).any():
                    pass
                if some.eq(-1).any():
                    middle[me].set()
                die()
            loss = outcome(work)
            group.revoke()
            group.join(PATIENCE)
            kept = output.clone()
            assert source.eq(me + 1).all(), "the input was written to"
            assert loss or output.eq(10).all(), "a sum that succeeded is not whole"
            time.sleep(0.05)
            assert output.equal(kept), "the output was written to after join"
            return loss and loss.peer
        results = cluster.each(body)
        survivors = [m for m in range(4) if m not in victims]
        assert [results[victim] for victim in victims] == [KILLED] * len(victims)
        assert {results[m] for m in survivors} <= {None, *victims}
        cluster.form(survivors)
        sums_are_right(cluster)
    return all(event.is_set() for event in middle.values()) and any(results[m] in victims for m in survivors)


@pytest.mark.parametrize("victims", [(1,), (0, 2)])
def test_killed_in_the_middle_of_a_transfer(name, victims):
    assert any(transfer(name, victims) for _ in range(5)), "nobody died in the middle"


def test_nobody_killed_in_the_middle_of_a_transfer(name):
    assert transfer(name, ()) is False


@pytest.mark.parametrize("inject", [True, False])
def test_killed_after_its_part_is_done(name, inject):
    """When all have what it gave: that stands, only what comes later fails."""
    everybody = multiprocessing.get_context("fork").Barrier(3, timeout=PATIENCE)
    with processes(3, name) as cluster:
        def body(me, group):
            output = torch.empty(1000)
            group.all_reduce(1, [torch.ones(1000)], [output]).wait(PATIENCE)
            group.gather(2, b"").wait(PATIENCE)
            everybody.wait()
            if me == 1 and inject:
                die()
            loss = outcome(group.gather(3, b""))
            return output.unique().tolist(), loss and loss.peer
        blamed = 1 if inject else None
        assert cluster.each(body) == {0: ([3.0], blamed), 1: KILLED if inject else ([3.0], None), 2: ([3.0], blamed)}
        cluster.form()
        sums_are_right(cluster)


@pytest.mark.parametrize("inject", [True, False])
def test_frozen(name, inject):
    """Lost by its silence. The control computes for two timeouts, which is nothing to hold against it."""
    with processes(3, name, failure_timeout=1) as cluster:
        def body(me, group):
            if me == 1:
                if inject:
                    freeze()
                time.sleep(2)
            output = torch.empty(BIG)
            loss = outcome(group.all_reduce(1, [torch.ones(BIG)], [output]))
            if loss:                                    # else the first to have its sum would end it for others
                group.revoke()
                group.join(PATIENCE)
            return loss and (loss.peer, "silent" in loss.reason)
        results = cluster.each(body)
        if not inject:
            assert results == dict.fromkeys(range(3))
            return
        assert results == {0: (1, True), 1: FROZEN, 2: (1, True)}
        cluster.form((0, 2))
        sums_are_right(cluster)


@pytest.mark.parametrize("wakes", [True, False])
def test_late_words_of_an_old_view(name, wakes):
    """A member wakes up when the others have gone on, and speaks: proven by its flag; nobody listens."""
    spoke = shared_event()
    with processes(3, name, failure_timeout=1) as cluster:
        def stop(me, group):
            works = [group.all_reduce(op, [torch.full((BIG,), 1e6)], [torch.empty(BIG)]) for op in (1, 3)]
            if me == 1:
                freeze()
                works += [group.gather(2, b"late"), group.gather(4, b"late")]
                lost = [outcome(work) for work in works]
                if all(lost[2:]):
                    spoke.set()
                time.sleep(PATIENCE)
            return sorted({outcome(work) is not None for work in works})
        assert cluster.each(stop)[1] == FROZEN
        cluster.form((0, 2))
        if wakes:
            cluster.thaw(1)
            assert spoke.wait(PATIENCE)
        sums_are_right(cluster)
        assert spoke.is_set() == wakes


@pytest.mark.parametrize("inject", [True, False])
def test_cut_off(name, inject):
    """Connections break, nobody dies: both sides notice, and the same members go on in a new view."""
    with processes(3, name, failure_timeout=1) as cluster:
        def body(me, group):
            group.gather(1, b"").wait(PATIENCE)
            if me == 1 and inject:
                group.sever()
            # what others had sent before the cut may still complete the first; the second needs an answer to it
            outcomes = [outcome(group.gather(op, b"")) for op in (2, 3)]
            return any(outcomes)
        assert cluster.each(body) == dict.fromkeys(range(3), inject)
        cluster.form()
        sums_are_right(cluster)


@pytest.mark.parametrize("inject", [True, False])
def test_revoke_while_eight_wait(name, inject):
    """Of eight operations that only one member has launched, all waiters wake; the other hears of it."""
    launched = shared_event()
    with processes(2, name) as cluster:
        def body(me, group):
            sources = [torch.full((200_000,), float(i)) for i in range(8)]
            outputs = [torch.full((200_000,), -1.0) for _ in range(8)]
            if me == 1:
                assert launched.wait(PATIENCE)
                works = [group.all_reduce(i, [s], [o]) for i, (s, o) in enumerate(zip(sources, outputs, strict=True))
                         if not inject]
                return [outcome(work) for work in works] or outcome(group.gather(100, b"")).reason
            works = [group.all_reduce(i, [s], [o]) for i, (s, o) in enumerate(zip(sources, outputs, strict=True))]
            losses = []
            threads = [threading.Thread(target=lambda w=w: losses.append(outcome(w))) for w in works]
            for thread in threads:
                thread.start()
            if inject:
                group.revoke()
            launched.set()
            for thread in threads:
                thread.join(PATIENCE)
            group.join(PATIENCE) if inject else None
            assert all(s.eq(i).all() for i, s in enumerate(sources))
            assert all(o.eq(-1 if inject else 2 * i).all() for i, o in enumerate(outputs))
            return [loss and loss.reason for loss in losses]
        results = cluster.each(body)
        if inject:
            assert results[0] == ["revoked by this rank"] * 8
            assert "gave up" in results[1]
        else:
            assert results == {0: [None] * 8, 1: [None] * 8}
        cluster.form()
        sums_are_right(cluster)


@pytest.mark.parametrize("inject", [True, False])
def test_sizes_that_differ(name, inject):
    with processes(2, name) as cluster:
        def body(me, group):
            size = 10 + (me if inject else 0)
            loss = outcome(group.all_reduce(7, [torch.ones(size)], [torch.ones(size)]))
            return loss and ("40 bytes" in loss.reason, "44 bytes" in loss.reason)
        assert cluster.each(body) == dict.fromkeys(range(2), (True, True) if inject else None)
        cluster.form()
        sums_are_right(cluster)


def test_members_that_do_not_come(name):
    """In time, with names; at once for a view that is over, now and later; and the next view is none the worse."""
    with processes(3, name) as cluster:
        cluster.number = 3

        def body(me, group):
            if me:
                return None
            backend, view = cluster.backend, cluster.view()
            with pytest.raises(PeerLost, match=r"\[1, 2\] did not enter view"):
                backend.form(view, 0, me, 0.2)
            late = View((0, 9), view.members, view.endpoints)
            timer = threading.Timer(0.1, lambda: backend.abandon((0, 10)))
            timer.start()
            for _ in range(2):
                with pytest.raises(PeerLost, match="is over"):
                    backend.form(late, 0, me, PATIENCE)
            return "refused"
        assert cluster.each(body) == {0: "refused", 1: None, 2: None}
        cluster.number = 20
        cluster.form()
        sums_are_right(cluster)


@pytest.mark.parametrize("dies", [True, False])
def test_killed_while_a_view_forms(name, dies):
    with processes(3, name) as cluster:
        cluster.number += 1

        def body(me, group):
            if me == 1:
                die() if dies else time.sleep(0.5)
            try:
                return cluster.backend.form(cluster.view((0, 1, 2)), 0, me, PATIENCE).members
            except PeerLost as loss:
                return loss.peer                        # one may only have seen that the other survivor gave up
        results = cluster.each(body)
        if dies:
            assert results[1] == KILLED
            assert 1 in (results[0], results[2])
            assert all(isinstance(results[m], int) for m in (0, 2))
        else:
            assert results == dict.fromkeys(range(3), (0, 1, 2))
        cluster.form()
        sums_are_right(cluster)


def held():
    """(files, threads, bytes) of this process."""
    with open("/proc/self/statm") as file:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("leak", [None, "file", "memory"])
def test_two_hundred_views_leave_nothing_behind(name, leak):
    """The control leaks one file, or 200 kB, per view on purpose, and is found out."""
    finished = {count: multiprocessing.get_context("fork").Barrier(count, timeout=PATIENCE) for count in (2, 3)}
    with processes(3, name) as cluster:
        def body(me, group):
            source, output, leaks = torch.ones(100_000), torch.empty(100_000), []
            for number in range(2, 203):
                cluster.number, members = number, (0, 1, 2) if number % 2 else (0, 2)
                if me in members:
                    group = cluster.backend.form(cluster.view(members), 0, me, PATIENCE)
                    group.all_reduce(1, [source], [output]).wait(PATIENCE)
                    assert output.eq(len(members)).all()
                    finished[len(members)].wait()       # else the first to leave would end it for others
                    group.gather(3, b"" if me else b"alone")    # one that may be pending when the view ends
                if leak is not None:
                    leaks.append(open("/dev/null") if leak == "file" else mmap.mmap(-1, 200 << 10))  # noqa: SIM115
                if leak == "memory":                    # pages of its own: a heap may have room for it
                    leaks[-1].write(bytes(200 << 10))
                if number == 50:
                    early = held()
                    if me in members:
                        finished[len(members)].wait()   # nobody has left this view yet
            for _ in range(100):                        # closed connections linger until the peer has closed too
                files, threads, memory = held()
                if files <= early[0]:
                    break
                time.sleep(0.02)
            return files <= early[0], threads <= early[1], memory - early[2] < 20 << 20
        assert cluster.each(body) == dict.fromkeys(range(3), (leak != "file", True, leak != "memory"))


@pytest.mark.parametrize("closes", [True, False])
def test_last_words_before_an_orderly_end_arrive(name, closes):
    """A member ends at once after an operation that was whole for it; the control has no operation to be whole."""
    with processes(2, name) as cluster:
        def body(me, group):
            if me == 1:
                time.sleep(0.1)                         # looks late
            if me == 0:
                if closes:
                    group.gather(1, b"last words").wait(PATIENCE)
                cluster.backend.close()
                os._exit(0)
            return outcome(group.gather(1, b"")) is None
        results = cluster.each(body)
        assert results[0] == Died(0)
        assert results[1] is closes
