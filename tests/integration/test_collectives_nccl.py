"""The `nccl` backend over a double of NCCL: what sockets decide, and what NCCL is given. (Where there is a GPU, the
conformance tests run over the real one.)"""
from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
import uuid

import pytest
import torch

import nccl_double
from collectives_harness import PATIENCE, ranks, view_of
from recover.collectives import create, nccl, register
from recover.config import Timeouts
from recover.errors import PeerLost

pytestmark = pytest.mark.integration
NAME = "nccl-double"
register(NAME, nccl_double.DoubleBackend)


@pytest.fixture
def cluster():
    with ranks(3, NAME, run_id=uuid.uuid4().hex) as made:
        yield made


def switch(cluster):
    group = cluster.groups[0]
    return nccl_double.SWITCHES[cluster.backends[0]._run_id, group.view]


def in_any_order(cluster, count=30):
    """Everyone launches the same sums, each in an order of its own."""
    def body(me, group):
        chance = random.Random(me)
        numbers = list(range(count))
        chance.shuffle(numbers)
        works, outputs = {}, {}
        for n in numbers:
            outputs[n] = torch.zeros(n + 1)
            works[n] = group.all_reduce(n, [torch.full((n + 1,), float(me + n))], [outputs[n]])
        for work in works.values():
            work.wait(PATIENCE)
        return all(bool((outputs[n] == 3 * n + 3).all()) for n in numbers)
    return cluster.each(body)


def test_nccl_hears_one_order_whatever_the_members_order(cluster):
    assert in_any_order(cluster) == dict.fromkeys(range(3), True)
    assert not switch(cluster).mixed
    assert len(switch(cluster).calls) == 30


def test_without_turns_calls_would_be_mixed_up(cluster, monkeypatch):
    """Negative control: everyone launches as it comes."""
    def take(self, turn, operation):
        pass

    def start(self):
        self._turns.communicator.fly([self.leg._inputs[0]], [self.leg._outputs[0]], None)
        return {}
    monkeypatch.setattr(nccl.Turns, "take", take)
    monkeypatch.setattr(nccl.NcclReduce, "start", start)

    def body(me, group):
        for n in range(30) if me else range(29, -1, -1):
            group.all_reduce(n, [torch.ones(n + 1)], [torch.zeros(n + 1)])
        group.gather(99, b"").wait(PATIENCE)
    cluster.each(body)
    assert switch(cluster).mixed


def test_nothing_is_given_to_nccl_before_all_are_ready(cluster):
    first = threading.Barrier(3)

    def body(me, group):
        out = torch.zeros(4)
        if me:
            work = group.all_reduce(1, [torch.ones(4)], [out])
        group.gather(2, b"").wait(PATIENCE)
        seen = len(switch(cluster).calls)
        first.wait(PATIENCE)
        if not me:
            work = group.all_reduce(1, [torch.ones(4)], [out])
        work.wait(PATIENCE)
        return seen, out.tolist()
    assert cluster.each(body) == {m: (0, [3.0] * 4) for m in range(3)}


@pytest.mark.parametrize("how", ["revoke", "sever", "close"])
def test_who_waits_in_nccl_is_freed(cluster, how):
    """The GPU would wait for ever: the sockets end it, and the communicator is aborted before `join` returns."""
    switch(cluster).held = True

    def body(me, group):
        given, out = torch.ones(5), torch.zeros(5)
        work = group.all_reduce(1, [given], [out])
        group.gather(2, b"").wait(PATIENCE)
        until = time.monotonic() + PATIENCE
        while len(switch(cluster).calls.get(1, ())) < 3:
            assert time.monotonic() < until
            time.sleep(0.001)
        if me == 1:
            getattr(group, how)()
        with pytest.raises(PeerLost):
            work.wait(PATIENCE)
        group.revoke()
        group.join(PATIENCE)
        assert given.tolist() == [1.0] * 5
        return group.turns.communicator.aborted
    assert cluster.each(body) == dict.fromkeys(range(3), True)
    old = switch(cluster)
    cluster.form()
    assert old.aborted == 3
    assert in_any_order(cluster, 3) == dict.fromkeys(range(3), True)


def test_a_gate_holds(cluster):
    def body(me, group):
        out = torch.zeros(2)
        gate = group.gather(1, b"") if me else None
        work = group.all_reduce(2, [torch.ones(2)], [out], after=gate)
        if not me:
            with pytest.raises(TimeoutError):
                work.wait(0.05)                         # the others wait behind what this one has not begun
            group.gather(1, b"").wait(PATIENCE)
        work.wait(PATIENCE)
        return out.tolist()
    assert cluster.each(body) == {m: [3.0, 3.0] for m in range(3)}


def test_sizes_that_differ_are_an_error_on_all(cluster):
    def body(me, group):
        with pytest.raises(PeerLost):
            group.all_reduce(1, [torch.ones(2 + me)], [torch.zeros(2 + me)]).wait(PATIENCE)
        return len(switch(cluster).calls)
    assert set(cluster.each(body).values()) == {0}


def test_what_nccl_has_no_part_in_goes_through_sockets(cluster):
    def body(me, group):
        out = torch.zeros(3, dtype=torch.float64)
        group.all_reduce(1, [torch.ones(3, dtype=torch.float64)], [out]).wait(PATIENCE)
        return out.tolist(), len(switch(cluster).calls)
    assert cluster.each(body) == {m: ([3.0] * 3, 0) for m in range(3)}


def test_one_member_sums_alone():
    with ranks(1, NAME, run_id=uuid.uuid4().hex) as made:
        def body(me, group):
            out = torch.zeros(3)
            group.all_reduce(1, [torch.ones(3)], [out]).wait(PATIENCE)
            return out.tolist()
        assert made.each(body) == {0: [1.0] * 3}


def test_a_view_that_is_over_while_nccl_connects_is_given_up(monkeypatch):
    """Negative control: without `abandon` it would wait for the first sum until its time is over."""
    waits = threading.Event()

    def connect(self, group, timeout):
        waits.set()
        while group.lost is None:
            time.sleep(0.001)
        raise group.lost
    monkeypatch.setattr(nccl_double.DoubleBackend, "connect", connect)
    with ranks(1, NAME, form=False, run_id=uuid.uuid4().hex) as made:
        backend = made.backends[0]
        threading.Thread(target=lambda: waits.wait(PATIENCE) and backend.abandon((0, 9)), daemon=True).start()
        with pytest.raises(PeerLost, match="is over"):
            backend.form(made.view(), 0, 0, PATIENCE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="needs a GPU"):
        create("nccl", run_id="x", token=b"x", timeouts=Timeouts(failure_timeout=5))


# ---------------------------------------------------------------- the real one

GPU = [pytest.mark.gpu, pytest.mark.timeout(180),
       pytest.mark.skipif(not torch.cuda.is_available() or not torch.distributed.is_nccl_available(),
                          reason="needs a GPU, and a torch with NCCL")]
WORLDS = [1, pytest.param(2, marks=pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"),
    reason="needs two GPUs, or NCCL_MULTI_RANK_GPU_ENABLE=1 where NCCL can do that"))]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def real_member(pipe, me, size):
    """A process of its own (CUDA does not survive a fork): joins, does what it is told, says what came out."""
    torch.cuda.set_device(me % torch.cuda.device_count())
    backend = create("nccl", run_id="gpu", token=b"secret", timeouts=Timeouts(failure_timeout=10))
    pipe.send(backend.endpoint)
    endpoints = pipe.recv()
    group = backend.form(view_of(endpoints), 0, me, 60)
    pipe.send([sums(group, me, size, dtype) for dtype in DTYPES])
    if pipe.recv() == "lose":
        given, out = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
        work = group.all_reduce(1000, [given], [out])
        if me == size - 1 > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        lost = None
        try:
            if size > 1:
                group.all_reduce(1001, [given], [out]).wait(60)
            work.wait(60)
        except PeerLost as loss:
            lost = loss.reason
        group.revoke()
        group.join(30)
        alone = backend.form(view_of(endpoints, 2, [me]), 0, me, 60)
        pipe.send((lost, bool((given == 1).all()), sums(alone, 0, 1, torch.float32)))
    backend.close()


def sums(group, me, size, dtype):
    numbers = list(range(20))
    random.Random(me).shuffle(numbers)
    works, outputs = [], {}
    for n in numbers:
        given = torch.full((1 + 1000 * n,), me + 1, dtype=dtype, device="cuda") * 2     # not done yet when it is launched
        outputs[n] = torch.zeros_like(given)
        works.append(group.all_reduce(20 * DTYPES.index(dtype) + n, [given], [outputs[n]]))
    for work in works:
        work.wait(60)
    return all(bool((out == size * (size + 1)).all()) for out in outputs.values())


@pytest.mark.parametrize("size", [pytest.param(w.values[0], marks=[*GPU, *w.marks]) if not isinstance(w, int)
                                  else pytest.param(w, marks=GPU) for w in WORLDS])
def test_the_real_nccl_sums_and_ends(size):
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for me in range(size):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=real_member, args=(theirs, me, size), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        endpoints = dict(enumerate(received(pipe) for pipe in pipes))
        for pipe in pipes:
            pipe.send(endpoints)
        assert [received(pipe) for pipe in pipes] == [[True] * len(DTYPES)] * size
        for pipe in pipes:
            pipe.send("lose")
        for pipe in pipes[:max(1, size - 1)]:
            lost, untouched, summed = received(pipe)
            assert (lost is not None) == (size > 1)
            assert untouched
            assert summed
    finally:
        for process in processes:
            process.kill()


def received(pipe):
    assert pipe.poll(120), "a member says nothing"
    return pipe.recv()
