"""What is particular to `ulfm`: messages that no member of the view sends, and who proves to belong."""
import struct

import pytest

from collectives_harness import PATIENCE
from collectives_processes import MISSING, processes
from recover.errors import PeerLost

pytestmark = [pytest.mark.integration, pytest.mark.skipif("ulfm" in MISSING, reason=MISSING.get("ulfm", ""))]
FRAMES = 2


@pytest.mark.parametrize(("view", "harms"), [((0, 1), False), ((-3, 9), False), ((0, 2), True)])
def test_messages_of_an_old_view_are_dropped(view, harms):
    """Forged ones, which a late member might have sent. The control, of the view that is in force, is taken for what it says."""
    with processes(2, "ulfm") as cluster:
        cluster.form()

        def body(me, group):
            group.gather(1, b"").wait(PATIENCE)
            if me == 1:
                message = struct.pack("<Bqqqq", FRAMES, *view, 1, 0) + bytes(range(100))
                cluster.backend._loop.call(lambda: cluster.backend._lanes[0].send(message))
            try:
                group.gather(2, b"").wait(PATIENCE)
                group.gather(3, b"").wait(PATIENCE)     # the forged one came before this
            except PeerLost as loss:
                return "no member sends that" in loss.reason
            return None
        assert cluster.each(body) == dict.fromkeys(range(2), True if harms else None)


@pytest.mark.parametrize("token", [b"another", None])
def test_another_token_does_not_meet(token):
    with processes(2, "ulfm", form=False) as cluster:
        def change(me, group):
            if me == 1 and token is not None:
                cluster.backend._token = token
        cluster.each(change)
        results = cluster.try_to_form(timeout=2.0)
        if token is None:
            assert results == dict.fromkeys(range(2), (0, 1))
        else:
            assert all(isinstance(loss, PeerLost) for loss in results.values())
            assert any("another token" in loss.reason for loss in results.values())


def test_a_member_of_another_job_is_named():
    with processes(2, "ulfm", form=False) as cluster:
        cluster.number, cluster.endpoints = 1, {0: cluster.endpoints[0], 1: ("mpi:other-job", 0)}

        def body(me, group):
            if me == 0:
                with pytest.raises(PeerLost, match="another mpirun") as caught:
                    cluster.backend.form(cluster.view((0, 1)), 0, 0, PATIENCE)
                return caught.value.peer
        assert cluster.each(body) == {0: 1, 1: None}
