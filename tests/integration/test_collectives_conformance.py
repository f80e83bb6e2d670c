"""The contract, for every backend that is registered. Nobody dies here: see test_collectives_deaths.py."""
import threading
import time

import pytest
import torch

from collectives_harness import PATIENCE
from collectives_processes import backends, gather, shared_event
from recover.collectives import GATHER_LIMIT
from recover.errors import PeerLost

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("name", backends())]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def tensor_for(member, count, dtype):
    generator = torch.Generator().manual_seed(1000 * member + count)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_reduce_in_every_size(name, count, dtype):
    sizes = [0, 1, 7, 1000, 100_003]
    with gather(count, name) as cluster:
        def body(me, group):
            inputs = [tensor_for(me, n, dtype) for n in sizes]
            before = [t.clone() for t in inputs]
            outputs = [torch.full_like(t, 9) for t in inputs]
            works = [group.all_reduce(i, [inputs[i]], [outputs[i]]) for i in range(len(sizes))]
            assert [w.wait(PATIENCE) for w in works] == [None] * len(sizes)
            assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
            return outputs
        results = cluster.each(body)
    for index, n in enumerate(sizes):
        assert all(torch.equal(results[0][index], results[m][index]) for m in range(count)), "bits differ"
        exact = sum(tensor_for(m, n, dtype).double() for m in range(count))
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-6}.get(dtype, 1e-12)
        assert torch.allclose(results[0][index].double(), exact, rtol=tolerance, atol=tolerance * 100)


def test_several_tensors_and_megabytes_travel_as_one(name):
    with gather(3, name) as cluster:
        def body(me, group):
            inputs = [tensor_for(me, 3_000_001, torch.float32).view(1, -1), tensor_for(me, 129, torch.float64),
                      torch.zeros(0), torch.full((2, 3), me + 1)]
            outputs = [torch.empty_like(t) for t in inputs]
            group.all_reduce(5, inputs, outputs).wait(PATIENCE)
            return inputs, outputs
        results = cluster.each(body)
    for index in range(4):
        a, b, c = (results[m][0][index] for m in range(3))
        assert all(torch.equal(results[m][1][index], (a + b) + c) for m in range(3))


def test_a_hundred_megabytes(name):
    size = 25_000_000
    with gather(2, name) as cluster:
        def body(me, group):
            inputs = [torch.arange(size, dtype=torch.float32).mul_(me + 0.5)]
            outputs = [torch.empty_like(inputs[0])]
            group.all_reduce(1, inputs, outputs).wait(PATIENCE)
            group.gather(2, b"").wait(PATIENCE)         # nobody leaves before the other has it all
            expected = torch.arange(size, dtype=torch.float32).mul_(0.5) + torch.arange(size, dtype=torch.float32).mul_(1.5)
            return outputs[0].equal(expected)
        assert cluster.each(body) == {0: True, 1: True}


def test_many_in_flight(name):
    with gather(3, name) as cluster:
        def body(me, group):
            outputs = [torch.empty(1 + 997 * i) for i in range(60)]
            works = [group.all_reduce(i, [torch.full_like(o, me + i)], [o]) for i, o in enumerate(outputs)]
            for work in works:
                work.wait(PATIENCE)
            return [bool(o.eq(3 + 3 * i).all()) for i, o in enumerate(outputs)]
        assert cluster.each(body) == {m: [True] * 60 for m in range(3)}


def test_a_view_need_not_begin_at_zero_nor_be_dense(name):
    with gather(5, name, form=False) as cluster:
        cluster.form(members=(1, 2, 4))
        def body(me, group):
            output = torch.empty(10)
            group.all_reduce(0, [torch.full((10,), float(me))], [output]).wait(PATIENCE)
            return group.members, group.me, output[3].item()
        assert cluster.each(body) == {m: ((1, 2, 4), m, 7.0) for m in (1, 2, 4)}


def test_order_of_launches_may_differ(name):
    """One waits for each before it launches the next, others launch all at once, forwards and backwards."""
    size = 400_000
    with gather(3, name) as cluster:
        def body(me, group):
            outputs = [torch.empty(size) for _ in range(4)]

            def launch(i):
                return group.all_reduce(i, [torch.full((size,), float(me))], [outputs[i]])
            if me == 0:
                for i in range(4):
                    launch(i).wait(PATIENCE)
            else:
                for work in [launch(i) for i in (range(4) if me == 1 else range(3, -1, -1))]:
                    work.wait(PATIENCE)
            return all(o.eq(3).all() for o in outputs)
        assert all(cluster.each(body).values())


def test_a_member_may_be_far_ahead(name):
    """More than any bound on what is buffered: 100 fences of the largest size before the other launches one."""
    ahead = shared_event()
    with gather(2, name) as cluster:
        def body(me, group):
            if me == 1:
                assert ahead.wait(PATIENCE)
                time.sleep(0.3)                         # all that can come early is here now
            works = [group.gather(i, bytes([me]) * GATHER_LIMIT) for i in range(100)]
            works.append(group.all_reduce(100, [torch.ones(10)], [torch.empty(10)]))
            ahead.set()
            return [w.wait(PATIENCE) for w in works][:100]
        results = cluster.each(body)
    assert results[0] == results[1] == [{0: bytes(GATHER_LIMIT), 1: b"\1" * GATHER_LIMIT}] * 100


def test_gather(name):
    payloads = {0: b"", 1: b"hello", 2: bytes(range(256)) * 256}
    with gather(3, name) as cluster:
        results = cluster.each(lambda me, group: group.gather(9, payloads[me]).wait(PATIENCE))
        assert results == dict.fromkeys(range(3), payloads)
        assert all(list(r) == [0, 1, 2] for r in results.values())

        def too_much(me, group):
            with pytest.raises(ValueError, match="at most"):
                group.gather(10, bytes(GATHER_LIMIT + 1))
        cluster.each(too_much)


def test_broadcast_send_receive(name):
    with gather(3, name) as cluster:
        def body(me, group):
            many = [torch.full((3,), float(me)) for _ in range(1500)]       # more pieces than one system call takes
            big = torch.full((700_000,), me)
            flags = torch.full((5,), me == 1)
            works = [group.broadcast(1, many, 1), group.broadcast(2, [big, flags], 1)]
            [w.wait(PATIENCE) for w in works]
            got = torch.empty(300_000)
            mine = torch.full((300_000,), float(me))
            if me == 0:
                works = [group.send(3, [mine], 1), group.send(3, [mine], 2)]
            else:
                works = [group.receive(3, [got], 0)]
            [w.wait(PATIENCE) for w in works]
            return all(t.eq(1).all() for t in many), bool(big.eq(1).all()), bool(flags.all()), got.sum().item()
        results = cluster.each(body)
    assert [r[:3] for r in results.values()] == [(True, True, True)] * 3
    assert results[1][3] == results[2][3] == 0


def test_nothing_starts_before_what_it_waits_for(name):
    fence_may_go = shared_event()
    with gather(2, name) as cluster:
        def body(me, group):
            if me == 0:                                 # knows no fence: would be done at once if the other began early
                output = torch.empty(100_000)
                work = group.all_reduce(2, [torch.ones(100_000)], [output])
                with pytest.raises(TimeoutError):
                    work.wait(0.3)
                fence_may_go.set()
                group.gather(1, b"").wait(PATIENCE)
                work.wait(PATIENCE)
                return output[0].item()
            fence = group.gather(1, b"")
            output = torch.empty(100_000)
            work = group.all_reduce(2, [torch.ones(100_000)], [output], after=fence)
            later = group.gather(3, b"", after=work)
            assert fence_may_go.wait(PATIENCE)
            group.all_reduce(4, [torch.ones(1)], [torch.ones(1)], after=later)
            work.wait(PATIENCE)
            return output[0].item()
        assert cluster.each(body) == {0: 2.0, 1: 2.0}


def test_what_waits_for_a_failure_fails(name):
    with gather(2, name) as cluster:
        fences = {}

        def fail(me, group):
            if me == 0:
                fences[me] = group.gather(1, b"")
                group.revoke()
        cluster.each(fail)
        cluster.form()

        def wait(me, group):
            if me == 0:
                work = group.all_reduce(1, [torch.ones(1)], [torch.ones(1)], after=fences[me])
                with pytest.raises(PeerLost, match="had to wait for"):
                    work.wait(PATIENCE)
            return group.lost
        assert cluster.each(wait) == {0: None, 1: None}


def test_callbacks(name):
    """On another thread, if the work was not done yet: the other member launches only when the callback is there."""
    added = shared_event()
    with gather(2, name) as cluster:
        def body(me, group):
            seen, called, here = [], threading.Event(), threading.current_thread()

            def callback(work):
                seen.append((work.done(), threading.current_thread() is not here))
                called.set()
            if me == 1:
                assert added.wait(PATIENCE)
            work = group.gather(1, b"")
            if me == 0:
                work.add_done_callback(callback)
                added.set()
                assert called.wait(PATIENCE)
            work.wait(PATIENCE)
            work.add_done_callback(lambda w: seen.append("at once"))
            return seen
        assert cluster.each(body) == {0: [(True, True), "at once"], 1: ["at once"]}


def test_a_callback_may_launch_and_revoke(name):
    with gather(2, name) as cluster:
        def body(me, group):
            chain, finished = [], threading.Event()

            def launch_next(work):
                chain.append(len(chain))
                if len(chain) < 5:
                    group.gather(len(chain), b"").add_done_callback(launch_next)
                else:
                    finished.set()
            group.gather(0, b"").add_done_callback(launch_next)
            assert finished.wait(PATIENCE)
            return chain
        assert cluster.each(body) == {m: [0, 1, 2, 3, 4] for m in range(2)}

        def revoke(me, group):
            work = group.gather(70, b"")
            work.add_done_callback(lambda work: group.revoke())
            work.wait(PATIENCE)
            group.join(PATIENCE)
        cluster.each(revoke)


def test_numbers_in_use_and_bad_arguments(name):
    with gather(2, name) as cluster:
        def body(me, group):
            if me == 0:
                group.gather(1, b"")
                with pytest.raises(ValueError, match="unique"):
                    group.all_reduce(1, [torch.ones(1)], [torch.ones(1)])
                with pytest.raises(ValueError, match="not a member"):
                    group.send(2, [], 5)
                with pytest.raises(ValueError, match="itself"):
                    group.receive(2, [], 0)
                with pytest.raises(ValueError, match="separate outputs"):
                    group.all_reduce(2, [whole := torch.ones(1)], [whole])
                with pytest.raises(ValueError, match="can't sum"):
                    group.all_reduce(2, [torch.ones(1, dtype=torch.int32)], [torch.ones(1, dtype=torch.int32)])
        cluster.each(body)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_go_through_pinned_memory(name):
    with gather(2, name) as cluster:
        def body(me, group):
            source = torch.full((1_000_000,), float(me + 1), device="cuda").mul_(2)
            outputs = [torch.empty_like(source), torch.empty(3, dtype=torch.float64)]
            group.all_reduce(1, [source, torch.ones(3, dtype=torch.float64)], outputs).wait(PATIENCE)
            copied = torch.full((10,), me, device="cuda")
            group.broadcast(2, [copied], 1).wait(PATIENCE)
            return bool(outputs[0].eq(6).all()), outputs[1].tolist(), bool(copied.eq(1).all())
        assert cluster.each(body) == {m: (True, [2.0] * 3, True) for m in range(2)}
