"""The contract of a collectives backend: sums over survivors that end, whatever happens to the peers.

* A *group* joins the ranks at one position in all replicas of one view. It never outlives its view.
* Every call only enqueues and gives back a `Work`, which ends with a result or with `PeerLost` and nothing else. How
  long an operation may take is not limited (a peer may still be computing); what is limited is silence.
* After the first failure in a group all its unfinished operations fail, and later ones fail at once. The same
  operation may succeed on one member and fail on another: recovery (DESIGN 3.2) deals with that.
* After `PeerLost` outputs are garbage and inputs untouched. After `revoke` and `join` nothing reads or writes them.
* All members launch the operations of one view with equal numbers, sizes and dtypes. The order in which they launch
  them may differ, as long as each is launched without waiting for the result of one that another member launches later.

A further backend implements `Group` and `Backend` and calls `register`; the conformance tests run over every registered
name (docs/backends.md).
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from recover.config import Timeouts
from recover.errors import PeerLost
from recover.protocol.messages import Endpoint, View, ViewId

T = TypeVar("T")

GATHER_LIMIT = 64 << 10
"""Bytes that one member may give to a `gather`."""


class Work(ABC, Generic[T]):
    """An operation under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> T:
        """The result. Raises PeerLost, or TimeoutError if `timeout` seconds pass first. Not for callbacks."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[Work[T]], None]) -> None:
        """Call `callback(self)` once done: on the communication thread, or here and now if it is done already."""


class Group(ABC):
    """The ranks at one position in one view. All methods may be called from any thread; none but `join` waits."""

    view: ViewId
    members: tuple[int, ...]
    me: int

    @property
    @abstractmethod
    def lost(self) -> PeerLost | None:
        """The first failure seen (our own `revoke` included), else None."""

    @property
    @abstractmethod
    def on_loss(self) -> Callable[[PeerLost], None] | None:
        """Called once, on the communication thread, at the first failure that is not our own `revoke` or `close`;
        also if that failure came before this was set. It must not wait."""

    @on_loss.setter
    @abstractmethod
    def on_loss(self, callback: Callable[[PeerLost], None] | None) -> None: ...

    @abstractmethod
    def all_reduce(self, op: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor],
                   after: Work[Any] | None = None) -> Work[None]:
        """Sum `inputs` over all members into `outputs`, added in member order: the same bits on every member.

        Several tensors (float32, float64, bfloat16, float16 or int64; contiguous, any shape) travel as one operation.
        Half types are summed in float32 and rounded once; int64 wraps. `outputs` have the shapes and dtypes of
        `inputs` and share no memory with them. Nothing is sent before `after` succeeded; if that failed, so does this.

        `op` (0 <= op < 2**64) is unique in the view. Raises ValueError for tensors or numbers that don't fit.
        """

    @abstractmethod
    def broadcast(self, op: int, tensors: Sequence[Tensor], root: int) -> Work[None]:
        """Copy `tensors` of member `root` into those of all others."""

    @abstractmethod
    def send(self, op: int, tensors: Sequence[Tensor], to: int) -> Work[None]:
        """Copy `tensors` into those that member `to` gives to `receive` under the same number."""

    @abstractmethod
    def receive(self, op: int, tensors: Sequence[Tensor], source: int) -> Work[None]:
        """The other side of `send`."""

    @abstractmethod
    def gather(self, op: int, payload: bytes, after: Work[Any] | None = None) -> Work[dict[int, bytes]]:
        """Every member's `payload` (at most GATHER_LIMIT bytes), by member. Its success proves that all came here."""

    @abstractmethod
    def revoke(self) -> None:
        """Fail every operation of this process at once, pending and future. Idempotent."""

    @abstractmethod
    def join(self, timeout: float) -> None:
        """After `revoke`: wait until nothing touches a caller's buffer any more. TimeoutError after `timeout` s."""

    @abstractmethod
    def sever(self) -> None:
        """(For planned faults.) Break this rank's connections as a network would: nobody is told, nobody dies."""

    @abstractmethod
    def close(self) -> None:
        """`revoke`, for the orderly end: what finished operations still have to deliver is delivered."""


class Backend(ABC):
    """Makes the groups of one rank, one view after another."""

    endpoint: Endpoint
    """Where this rank's data connections are accepted."""

    facts: Mapping[str, str] = MappingProxyType({})
    """What must be equal on all ranks for this backend to connect them; compared when a rank asks to be let in."""

    @abstractmethod
    def form(self, view: View, position: int, me: int, timeout: float) -> Group:
        """Join the members of `view` at `position`, as member `me`; the group before is revoked and closed first.

        Returns once every other member has entered `form` for this view and is connected. Raises PeerLost when that
        fails or takes more than `timeout` seconds, ValueError if `me` is not in the view.
        """

    @abstractmethod
    def abandon(self, newest: ViewId) -> None:
        """Views older than `newest` are over: a `form` of one ends with PeerLost at once, now and later. Any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give up everything: group, thread, sockets. Idempotent."""


class Factory(Protocol):
    """What a backend registers: makes the Backend of this rank."""

    def __call__(self, *, run_id: str, token: bytes, timeouts: Timeouts, host: str | None = None,
                 toward: str | None = None) -> Backend: ...


_factories: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Make a backend known under `name`; the last one wins."""
    _factories[name] = factory


def names() -> list[str]:
    """The backends that `create` knows."""
    return sorted(_factories)


def create(name: str, *, run_id: str, token: bytes, timeouts: Timeouts, host: str | None = None,
           toward: str | None = None) -> Backend:
    """The backend `name` for this rank.

    `host` is the address, or the name of the interface, whose address peers shall connect to; without it the address
    of the route to `toward` ("host:port" of the coordinator), without that loopback. ValueError if that names nothing.
    """
    if name not in _factories:
        raise ValueError(f"there is no backend {name!r}; choose one of {', '.join(names())}")
    return _factories[name](run_id=run_id, token=token, timeouts=timeouts, host=host, toward=toward)
