"""Agreement among the ranks of one replica: small values from everyone to everyone, over our own collectives.

Not over torch's: an agreement must be interruptible. When a rank of the replica dies, the others' agreement ends with
`ReplicaBroken` at once; the replica leaves as a whole, and the launcher may start it again.

Values are typed by the kind of agreement (`KINDS`) and travel as msgpack, in pieces of at most 60 KiB: the first says how
many there are. All ranks of a replica agree in the same order, so a counter names the operations; that all are at the
same place is checked.
"""
from __future__ import annotations

import copy
import struct
from typing import Any, Protocol

import msgspec
import torch.distributed as dist

from recover.collectives.contract import Backend, Group
from recover.config import Timeouts
from recover.errors import PeerLost, ReplicaBroken
from recover.protocol.catchup import Progress
from recover.protocol.messages import Endpoint, Speed, View
from recover.protocol.position import Status
from recover.protocol.requests import Answer

PIECE = 60 << 10
HEAD = struct.Struct(">BH")                             # kind, pieces

Share = tuple[float, float, dict[str, tuple[float, float]], dict[str, tuple[float, float]]]
"""One position's part of a whole step: sum of weights, sum of losses, and sum and weight of each metric and each score."""
NOTHING: Share = (0.0, 0.0, {}, {})

KINDS: dict[str, Any] = {
    "turn": bool, "formed": tuple[bool, str], "began": bool, "exit": bool, "entered": bool, "status": Status,
    "answer": Answer | None, "saved": tuple[str, str, int], "fenced": bool,
    "offers": tuple[str, list[tuple[int, str]], list[str], str], "complete": tuple[bool, Speed, Share], "hash": str,
    "found": tuple[str, list[str]], "used": list[str], "joining": Progress, "verified": bool}
NAMES = list(KINDS)


class Agreement(Protocol):
    """What the engine needs."""

    def agree(self, kind: str, value: Any) -> list[Any]:
        """Everyone's values, by position. Raises ReplicaBroken."""

    def revoke(self) -> None:
        """The replica is to leave: wake up whoever waits."""

    def branch(self) -> Agreement:
        """A second agreement with the same ranks, for another thread: its calls are counted by themselves. Only one."""

    def close(self, patience: float) -> None:
        """The orderly end: not before all have come this far, but after `patience` seconds at the latest."""


class Alone:
    """A replica of one rank agrees with itself."""

    def agree(self, kind: str, value: Any) -> list[Any]:
        return [value]

    def revoke(self) -> None:
        pass

    def branch(self) -> Agreement:
        return self

    def close(self, patience: float) -> None:
        pass


class Inner:
    """The agreement of a replica of several ranks. `backend` is one of its own: its group never changes."""

    def __init__(self, backend: Backend, rank: int, ranks: int, timeouts: Timeouts) -> None:
        self.backend, self.calls, self.offset = backend, 0, 0
        endpoints: list[Any] = [None] * ranks
        dist.all_gather_object(endpoints, (backend.endpoint.host, backend.endpoint.port))
        view = View((0, 1), tuple(range(ranks)), {r: (Endpoint(*end),) for r, end in enumerate(endpoints)})
        try:
            self.group: Group = backend.form(view, 0, rank, timeouts.formation)
        except PeerLost as lost:
            raise ReplicaBroken(f"the ranks of this replica did not find each other: {lost}") from None

    def agree(self, kind: str, value: Any) -> list[Any]:
        payload = msgspec.msgpack.encode(value)
        pieces = [payload[at:at + PIECE] for at in range(0, len(payload), PIECE)]
        assert len(pieces) < 1 << 16, ("a value is too large to agree on", kind, len(payload))
        self.calls += 1
        given = self._gather(0, HEAD.pack(NAMES.index(kind), len(pieces)) + pieces[0])
        whole = {rank: bytearray(part[HEAD.size:]) for rank, part in given.items()}
        heads = {rank: HEAD.unpack_from(part) for rank, part in given.items()}
        kinds = {NAMES[number] for number, _ in heads.values()}
        assert kinds == {kind}, ("positions of one replica are at different places", kinds)
        for n in range(1, max(count for _, count in heads.values())):
            for rank, part in self._gather(n, pieces[n] if n < len(pieces) else b"").items():
                whole[rank] += part
        return [msgspec.msgpack.decode(bytes(whole[rank]), type=KINDS[kind]) for rank in sorted(whole)]

    def _gather(self, piece: int, payload: bytes) -> dict[int, bytes]:
        try:
            return self.group.gather(self.offset | self.calls << 16 | piece, payload).wait()
        except PeerLost as lost:
            raise ReplicaBroken(f"a rank of this replica is gone ({lost}); the others leave with it") from None

    def revoke(self) -> None:
        self.group.revoke()

    def branch(self) -> Inner:
        twin = copy.copy(self)
        twin.calls, twin.offset = 0, 1 << 62
        return twin

    def close(self, patience: float) -> None:
        if patience > 0:                                # whoever closes first would end the others' last agreement
            try:
                self.group.gather((1 << 63) | self.calls, b"").wait(patience)
            except (PeerLost, TimeoutError):            # they are past it, or gone: nothing that we need
                pass
        self.group.close()
        self.backend.close()
