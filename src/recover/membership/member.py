"""A rank's side of the membership: what the training thread asks, and the newest news from the coordinator.

Theory of operation
-------------------
* A thread of its own (`keeper.py`) keeps the connection, sends heartbeats and takes views as they are pushed, whatever
  the training thread does. `latest`, `pending` and `evicted` may be read from any thread; calls that wait do so on one
  condition, which every piece of news notifies. `on_view` is called on that thread, before anyone who waits wakes up.
* Views only ever grow: one with an older id than the newest known is ignored, whoever sends it (`incarnation`).
* A rank that has seen a view *announces* the newest when it connects again, instead of joining; training goes on
  meanwhile. If the view stands, nothing is pushed and nobody notices.
* What must not get lost with a connection is kept here and said again: a suspicion, that we finished or left. An
  exchange is not: it fails with `CoordinatorLost`, and whoever asked sends the same report again (it then waits for the
  coordinator's return).
* A refusal that may pass (the former process at our position is not known to be dead yet, another run's coordinator is
  still at the address) is tried again for twice the failure timeout.
"""
from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from recover.config import Environment, Timeouts
from recover.errors import CoordinatorLost, Evicted, JoinRefused, RecoverError, Stopped, ViewChanged, WireError
from recover.membership import wire
from recover.membership.activity import Activity
from recover.membership.address import parse_addresses
from recover.membership.answers import Answer
from recover.membership.handshake import Caller
from recover.membership.keeper import Keeper
from recover.membership.lifeline import Lifelines
from recover.membership.link import Link
from recover.membership.pulse import Pulse
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import NO_VIEW, Endpoint, Pending, View, ViewId

log = logging.getLogger("recover.membership")


class _Call:
    """One exchange in progress."""

    def __init__(self, view: ViewId, payload: bytes) -> None:
        self.view, self.payload = view, payload
        self.sent_on: Link | None = None
        self.broken = False
        self.answer = Answer()


class Member:
    """Speaks with the coordinator for one rank. `facts`: what all ranks must agree on (at most 100 short values).

    ValueError for a malformed coordinator address, or facts that can't be sent. Set `announcement` (what to announce
    after a break: the newest view, and whether its decision is confirmed) and `on_view` before `start()`; both are
    called on the member's thread and must not wait. `on_view` is called at each newer view, and when we are dropped.
    """

    def __init__(self, environment: Environment, timeouts: Timeouts, token: bytes, endpoint: Endpoint,
                 facts: dict[str, str | int | float | bool]) -> None:
        self.replica, self.rank = environment.replica, environment.rank
        self.name = f"replica {self.replica} rank {self.rank}"
        self.latest = View()
        self.pending: Pending | None = None
        self.evicted = False
        self.failure: RecoverError | None = None        # final: refused, or no coordinator for too long
        self.on_view: Callable[[View], None] | None = None
        self.announcement: Callable[[], Announcement] | None = None
        self._timeouts = timeouts
        self._identity = wire.Identity(environment.replica, environment.rank, environment.world_size, uuid.uuid4().hex,
                                       endpoint, timeouts.failure_timeout, dict(facts))
        self._check_identity()
        self._keeper = Keeper(self, parse_addresses(environment.coordinator), timeouts,
                              lambda: Caller(token, environment.run_id))
        self.activity = Activity(timeouts)
        beside = (self._linked_to, timeouts, lambda: Caller(token, environment.run_id))
        me = self.replica, self.rank, self._identity.life
        self._lifelines, self._pulse = Lifelines(*beside, wire.Lifeline(*me)), Pulse(*beside, wire.Pulse(*me))
        self._news = threading.Condition()
        self._call: _Call | None = None
        self._stats: wire.Stats | None = None
        self._suspicion: wire.Suspect | None = None
        self._farewell: wire.Finish | wire.Leave | None = None
        self._closing = False
        self._gone = False                              # we said farewell, and that connection is over
        self._refused_since: float | None = None

    def _check_identity(self) -> None:
        try:
            wire.from_rank().feed(wire.encode(wire.Join(self._identity)))
        except (WireError, OverflowError, TypeError) as error:
            raise ValueError(f"{self.name} can't join with these numbers and facts ({error}): at most 100 facts, each "
                             "a text of at most 1000 characters, a 64-bit number or a boolean") from None

    # -- calls from any thread --------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to connect and to join; returns at once."""
        self._keeper.start()
        self._lifelines.start()

    def vouch(self) -> None:
        """From now on let a process beside this one say that it runs, also while its interpreter is busy."""
        self._pulse.start()

    @property
    def connected(self) -> bool:
        """A coordinator has welcomed us, and the connection stands as far as is known."""
        return self._keeper.link is not None

    def wait_view(self, newer_than: ViewId, timeout: float) -> View:
        """The newest view, once it is newer than `newer_than`.

        Raises JoinRefused, Evicted, Stopped (no coordinator for `Timeouts.coordinator`), TimeoutError.
        """
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                self._raise_final()
                if self.latest.id > newer_than:
                    return self.latest
                self._wait(deadline, f"no view newer than {newer_than} within {timeout:g} s")

    def wait_news(self, timeout: float) -> View:
        """The first view, or (a joiner's) the one that is announced with the fence. Raises as `wait_view`."""
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                self._raise_final()
                if self.latest.id > NO_VIEW:
                    return self.latest
                if self.pending is not None:
                    return self.pending.view
                self._wait(deadline, f"no view within {timeout:g} s")

    def exchange(self, view: ViewId, payload: bytes, timeout: float) -> dict[int, bytes]:
        """Everyone's payloads in `view`, by member, once all have sent theirs. One call at a time.

        While there is no connection it waits for one. Raises ViewChanged (a newer view came first), CoordinatorLost
        (the connection broke in between: call again with the same payload), Evicted, Stopped, TimeoutError; ValueError
        for a payload above `wire.MAX_PAYLOAD` bytes.
        """
        if len(payload) > wire.MAX_PAYLOAD:
            raise ValueError(f"a report of {len(payload)} bytes is too long: at most {wire.MAX_PAYLOAD}")
        deadline = time.monotonic() + timeout
        call = _Call(view, payload)
        with self._news:
            assert self._call is None, "one exchange at a time"
            self._call = call
            self._keeper.post(self._send_call)
            try:
                return self._await(call, deadline)
            finally:
                self._call = None

    def _await(self, call: _Call, deadline: float) -> dict[int, bytes]:
        while True:
            self._raise_final()
            if self.latest.id > call.view:
                raise ViewChanged(f"view {self.latest.id} came before the exchange of {call.view} was complete")
            parts = call.answer.payloads
            whole = len(parts) == len(self.latest.members) and parts.keys() == set(self.latest.members)
            if self.latest.id == call.view and whole:
                return parts
            if call.broken:
                raise CoordinatorLost("the connection to the coordinator broke during an exchange")
            self._wait(deadline, f"the exchange of view {call.view} was not complete in time")

    def suspect(self, view: ViewId, reason: str, peer: int | None = None, unheard: tuple[int, ...] = ()) -> None:
        """Tell the coordinator that a collective of `view` failed here; returns at once, and is not forgotten.

        `peer`: to blame, where that is known; `unheard`: whom this rank itself does not reach over data connections.
        """
        with self._news:
            if self._suspicion is not None and self._suspicion.view >= view:
                return                                  # said already
            self._suspicion = wire.Suspect(view, reason[:1000], peer, unheard)
        self._keeper.post(self._send_suspicion)

    def hand(self, name: tuple[int, int] | None) -> None:
        """We begin to compute this microbatch, which died with another replica (None: that is over).

        It is with the operating system when this returns, at the latest after a heartbeat: even if we die of it, it is told.
        """
        sent = threading.Event()

        def send() -> None:
            self._keeper.send(wire.Hand(name))
            sent.set()
        self._keeper.post(send)
        if name is not None:
            sent.wait(self._timeouts.heartbeat)

    def entered(self, view: ViewId) -> None:
        """We have switched to the pending view."""
        with self._news:
            if self.pending and self.pending.view.id == view:
                self.latest, self.pending = self.pending.view, None
        self._keeper.post(lambda: self._keeper.send(wire.Entered(view)))

    def finish(self) -> None:
        """This replica passed the last fence: from now on the end of its connections is no loss."""
        self._say_farewell(wire.Finish())

    def leave(self) -> None:
        """This replica goes, as agreed with the others."""
        self._say_farewell(wire.Leave())

    def _say_farewell(self, farewell: wire.Finish | wire.Leave) -> None:
        with self._news:
            if self._farewell is not None:
                return
            self._farewell = farewell
        self._keeper.post(lambda: self._keeper.send(farewell))

    def close(self) -> None:
        """Send what is left, then close; takes about two seconds at most. Idempotent."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._pulse.close()
        self._keeper.join()
        self._lifelines.close()

    def stats(self) -> dict[str, Any]:
        """What the coordinator counted (see `wire.Stats`). Raises CoordinatorLost, TimeoutError."""
        deadline = time.monotonic() + self._timeouts.failure_timeout
        with self._news:
            self._stats = None
            self._keeper.post(lambda: self._keeper.send(wire.StatsRequest()))
            while self._stats is None:
                self._raise_final()
                if not self.connected:
                    raise CoordinatorLost("not connected to a coordinator")
                self._wait(deadline, "the coordinator does not answer")
            return {name: getattr(self._stats, name) for name in self._stats.__struct_fields__}

    def _raise_final(self) -> None:
        if self.evicted:
            raise Evicted(f"the others went on without replica {self.replica} (view {self.latest.id})")
        if self.failure is not None:
            raise self.failure
        if self._closing:
            raise Stopped("the membership was closed")

    def _wait(self, deadline: float, otherwise: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(otherwise)
        self._news.wait(left)

    # -- what the keeper reports, on its thread ---------------------------------------------------------------------
    @property
    def over(self) -> bool:
        """No connection is needed any more."""
        return self._closing or self._gone or self.evicted or self.failure is not None

    def _linked_to(self) -> tuple[str, int] | None:
        return self._keeper.address if self.connected else None

    def sign(self) -> wire.Heartbeat:
        return wire.Heartbeat(self.activity.beat())

    def opening(self) -> wire.Message:
        """Join, or announce the newest view known; while we suspect it, it isn't confirmed."""
        latest = self.latest
        if latest.id == NO_VIEW:
            return wire.Join(self._identity)
        said = self.announcement() if self.announcement else Announcement(latest, False)
        if said.view.id < latest.id:
            said = Announcement(latest, False)
        if self._suspicion is not None and self._suspicion.view >= said.view.id:
            said = Announcement(said.view, False)
        return wire.Announce(self._identity, said)

    def linked(self, link: Link | None) -> None:
        """We were welcomed, or (None) the connection is lost."""
        with self._news:
            if self._call is not None and self._call.sent_on not in (None, link):
                self._call.broken = True
            if link is None and self._farewell is not None:
                self._gone = True
            self._news.notify_all()
        if link is None:
            return None if self.over else log.warning("%s: lost the coordinator", self.name)
        log.debug("%s: welcomed by %s", self.name, link.address)
        self._refused_since = None
        self._send_suspicion()
        if self._farewell is not None:
            self._keeper.send(self._farewell)
        self._send_call()

    def heard(self, message: wire.FromCoordinator) -> None:
        """News."""
        match message:
            case wire.NewView():
                self._view(message.view)
            case wire.NewPending():
                self._announced(message.pending)
            case wire.Dropped():
                self._dropped(message)
            case wire.Parts():
                self._parts(message)
            case wire.Stats():
                with self._news:
                    self._stats = message
                    self._news.notify_all()

    def refused(self, reason: str, final: bool) -> None:
        """Not let in. With a view we go on trying: a member has nothing better to do, and training goes on."""
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if final or (self.latest.id == NO_VIEW and now - self._refused_since > 2 * self._timeouts.failure_timeout):
            self._fail(JoinRefused(reason))

    def gave_up(self, reason: str) -> None:
        self._fail(Stopped(reason))

    def ended(self) -> None:
        if not self.over:
            self._fail(Stopped("the member's thread ended unexpectedly: the log says why"))
        with self._news:
            self._news.notify_all()

    def _fail(self, failure: RecoverError) -> None:
        with self._news:
            self.failure = self.failure or failure
            self._news.notify_all()
        self._keeper.stir()

    def _view(self, view: View) -> None:
        with self._news:
            if view.id <= self.latest.id:
                return
            self.latest = view
            if self.pending and self.pending.view.id <= view.id:
                self.pending = None
            self.evicted = self.evicted or self.replica not in view.members
        self._tell(view)

    def _dropped(self, message: wire.Dropped) -> None:
        with self._news:
            if self._farewell is not None:              # we are going anyway
                return
            self.evicted = True
            if message.view.id > self.latest.id:
                self.latest = message.view
        log.warning("%s is out: %s", self.name, message.reason)
        self._tell(self.latest)

    def _tell(self, view: View) -> None:
        if self.on_view is not None:
            self.on_view(view)
        with self._news:
            self._news.notify_all()
        if self.evicted:
            self._keeper.stir()

    def _announced(self, pending: Pending) -> None:
        with self._news:
            if pending.view.id > self.latest.id:
                self.pending = pending
                self._news.notify_all()

    def _parts(self, message: wire.Parts) -> None:
        with self._news:
            call = self._call
            if call is not None and call.view == message.view:
                call.answer.add(message.chunk)
                self._news.notify_all()

    # -- sending, on the keeper's thread ----------------------------------------------------------------------------
    def _send_suspicion(self) -> None:
        if self._suspicion is not None and self._suspicion.view >= self.latest.id:
            self._keeper.send(self._suspicion)

    def _send_call(self) -> None:
        with self._news:
            call, link = self._call, self._keeper.link
            if call is None or link is None or call.sent_on is not None:
                return
            call.sent_on = link
        link.send(wire.Exchange(call.view, call.payload))
