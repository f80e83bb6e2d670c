"""The paper's guarded all-reduce over MPI: what survivors get when one dies before, in and between sums."""
import time

import pytest
import torch

from collectives_harness import PATIENCE
from collectives_processes import FROZEN, MISSING, Died, die, freeze, processes
from recover.errors import PeerLost

pytestmark = [pytest.mark.integration, pytest.mark.skipif("ulfm" in MISSING, reason=MISSING.get("ulfm", ""))]


def guarded(limit=PATIENCE, agree=True):
    from recover.collectives.guarded import Guarded
    return Guarded(limit, agree)


def values(me, dtype):
    return torch.randn(1003, generator=torch.Generator().manual_seed(me)).to(dtype)


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_sums_in_rank_order(dtype, agree):
    with processes(3, "ulfm", form=False) as cluster:
        def body(me, group):
            output = torch.empty(1003, dtype=dtype)
            who = guarded(agree=agree).all_reduce(values(me, dtype), output)
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            expected = ((values(0, dtype).to(wide) + values(1, dtype).to(wide)) + values(2, dtype).to(wide)).to(dtype)
            return who, output.equal(expected)
        assert cluster.each(body) == dict.fromkeys(range(3), ([0, 1, 2], True))


@pytest.mark.parametrize("dies", [True, False])
def test_a_death_is_repaired_and_recorded(dies):
    """One is killed while the others wait for it; the control goes on with all."""
    with processes(4, "ulfm", form=False) as cluster:
        def body(me, group):
            sums, source, output, found = guarded(), torch.full((200_000,), 10.0 ** me), torch.empty(200_000), []
            for turn in range(3):
                if turn == 1 and me == 1 and dies:
                    time.sleep(0.1)
                    die()
                found.append((sums.all_reduce(source, output), output.unique().tolist()))
                assert source.eq(10.0 ** me).all()
            return found, sums.lost
        whole, left = ([0, 1, 2, 3], [1111.0]), ([0, 2, 3], [1101.0])
        expected = ([whole, left, left], [1]) if dies else ([whole] * 3, [])
        assert cluster.each(body) == {m: Died(9) if m == 1 and dies else expected for m in range(4)}


def test_one_who_lives_but_is_not_in_the_view_is_left_out():
    """The frozen one holds up agreement until the limit; the view without it goes on, though MPI would keep it."""
    with processes(3, "ulfm", form=False) as cluster:
        def body(me, group):
            sums, source, output = guarded(limit=1.0), torch.full((10,), me + 1.0), torch.empty(10)
            sums.all_reduce(source, output)
            if me == 1:
                freeze()
            with pytest.raises(PeerLost, match="the view names"):
                sums.conform([0, 2, 7])
            sums.conform([0, 2])
            return sums.all_reduce(source, output), output[0].item()
        assert cluster.each(body) == {0: ([0, 2], 4.0), 1: FROZEN, 2: ([0, 2], 4.0)}
