"""Joining a run under way: the joiner's script catches up while the others go on.

Theory of operation
-------------------
* From its entry on a joiner takes part in every step with zeros, on a thread of its own (the *pump*), which drives the
  protocol like any member's training thread. It reduces into a second set of buffers (the *mirror*), that touches no
  parameter, and keeps what comes out.
* Meanwhile a copy of the state comes in (`fetching`). The script then runs its own loop over the kept steps: the inner
  loop has no turns, `.grad` holds each step's sums, and its own clipping, optimizer and scheduler do the rest.
* When the script waits for the step that is just being committed, the pump ends, and the script's thread drives the
  protocol itself, like everyone's (`protocol.catchup` decides that, alike on all positions of a replica).
* Before it asks for a quota the joiner compares the hash of its state with a giver's, for one step's beginning. If they
  differ it goes, and nobody else has noticed anything. It says no hash with the fence before that.
* What is kept is bounded: beyond it, the steps at hand are dropped and a newer copy is fetched; the script jumps.
* Receipts of replayed steps are published once the state was found to be the others': a jump would leave a gap in them,
  and a state that is not the run's has no place in its records.
"""
from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from recover.collectives.contract import Group
from recover.errors import Diverged, JoinRefused, PeerLost, Stopped, WireError
from recover.gradients.commit import lessons
from recover.gradients.layout import Learned
from recover.parallel.inner import Agreement, Share
from recover.protocol import catchup
from recover.protocol import requests as ask
from recover.protocol.catchup import Do, Progress, next_move
from recover.training.fetching import Fetch, text_of
from recover.training.giving import Answer, Asker, What
from recover.training.snapshot import Head, Snapshot
from recover.training.sums import Sums

if TYPE_CHECKING:
    from recover.training.engine import Engine

log = logging.getLogger("recover.training")
LEVEL = "recover.join.level"
KEPT_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
"""What may be kept of steps that are not replayed yet, per rank (but never less than two steps)."""


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """What a joiner must know before it takes part: what scripts and models must have alike, and what step 0 taught."""

    alike: list[str]
    learned: Learned | None


@dataclass(frozen=True)
class Kept:
    """A committed step that is to be replayed."""

    request: ask.Commit
    shares: list[Share]
    sums: list[list[Tensor]]
    missing: frozenset[int]

    @property
    def size(self) -> int:
        return sum(part.numel() * part.element_size() for parts in self.sums for part in parts)


@dataclass
class Segment:
    """A copy that all positions have, the state in which `start` begins; steps from `hole` on were not kept."""

    start: int
    head: Head
    data: Tensor
    hole: int | None = None


@dataclass(frozen=True)
class Hands:
    """What joining does to the script's objects. `twin`: sums with the same buckets that touch no parameter. `size`: about
    the bytes of a copy. `take`: a copy of the state in which a step begins, in memory that was made ready or in its own."""

    twin: Callable[[], Sums]
    size: Callable[[], int]
    take: Callable[[int, Tensor | None], Snapshot]
    load: Callable[[Head, Tensor], None]


class Joiner:
    """One position of a replica that catches up. `open` and `keep` are called by whoever drives the engine."""

    def __init__(self, engine: Engine, hands: Hands) -> None:
        self.engine, self.hands, self.sums = engine, hands, engine.sums
        self.fetch = Fetch(engine.timeouts)
        self.branch: Agreement = engine.inner.branch()
        self._news = threading.Condition()
        self._kept: dict[int, Kept] = {}
        self._mirror = hands.twin()
        self._pump: threading.Thread | None = None
        self._error: BaseException | None = None
        self._start = -1                                # of the attempt
        self._tries = 0
        self._ready = False                             # its copy may be put in place
        self._segments: list[Segment] = []              # to be replayed, the first one now
        self._placed = False                            # its copy is in place
        self._awaits = -1                               # the step whose sums the script waits for
        self._inside = False                            # it takes part
        self._next: int | None = None                   # the step that the script replays next
        self._begun = False
        self._over = self._taken = self._live_now = False
        self._mine: tuple[int, str] | None = None       # a step, and the hash of the own state at its beginning ("": not yet)
        self._entered = time.monotonic()

    @property
    def replays(self) -> bool:
        """The script is not level with the run yet: what it does now, the others have done."""
        return not self._live_now

    # -- whoever drives the engine ----------------------------------------------------------------------------------
    def open(self, group: Group, givers: tuple[int, ...], step: int, layout: int) -> bool:
        """A view stands that this joiner is in at `step`; False: it fell already. ValueError for a script that differs."""
        askers = [Asker(group, giver) for giver in givers]
        if not self._inside:
            try:
                self._enter(askers, step, layout)
            except PeerLost as lost:
                log.info("entering failed: %s", lost)
                return False
        self.fetch.open(askers)
        return True

    def _enter(self, askers: list[Asker], step: int, layout: int) -> None:
        if not askers:
            raise Stopped("no member of this run holds the parameters")
        answer, body = askers[0].ask(What.WELCOME)
        if answer is not Answer.HERE:
            raise JoinRefused(f"member {askers[0].giver} can't say what a joiner must know: {text_of(body)}")
        try:
            welcome = msgspec.msgpack.decode(body.numpy().tobytes(), type=Welcome)
        except msgspec.MsgspecError as wrong:
            raise WireError(f"not a welcome: {wrong}") from None
        compare(welcome.alike, self.engine.alike())
        engine, mirror = self.engine, self._mirror
        if welcome.learned is not None:
            engine.lessons = welcome.learned
            if layout:
                mirror.store.begin_with(welcome.learned)
        engine.sums, engine.needs_calibration, engine.publisher.paused = mirror, False, True
        self._inside, self._start, self._entered = True, catchup.first_start(step), time.monotonic()
        self.fetch.begin(self._start)

    def keep(self, request: ask.Commit) -> None:
        """(Pump.) `request.step` is whole: keep its sums, tell the other positions where this one is, do as all do."""
        engine, mirror = self.engine, self._mirror
        assert mirror is not None
        if mirror.store.learned is None and request.step == 0:
            engine.lessons = lessons(mirror.store.buckets, len(mirror.store.signature()))
        kept = None
        if request.step >= self._start:
            sums = [[part.detach().to("cpu", copy=True) for part in mirror.outputs(b)] for b in range(mirror.count)]
            kept = Kept(request, list(engine.shares), sums, engine.put_aside(request.step))
        with self._news:
            if kept is not None:
                self._kept[request.step] = kept
            held = sum(each.size for step, each in self._kept.items() if step >= self._start)
            full = kept is not None and held > max(KEPT_BYTES, 2 * kept.size)
            mine = Progress(self.fetch.whole, self.fetch.failed, self._awaits, full)
        told = engine.agreed("joining", mine)
        with self._news:
            self._do(request.step, next_move(request.step, self._ready, self._tries, told))
            self._news.notify_all()

    def _do(self, step: int, move: catchup.Move) -> None:
        if move.do is Do.READY:
            head, data = self.fetch.take()
            self._segments.append(Segment(self._start, head, data))
            self._ready, self._tries = True, 0
        elif move.do is Do.TAKE_OVER:
            self._taken = True
            self.engine.sums, self.engine.keep = self.sums, None
        elif move.do is Do.AGAIN:
            if len(self._segments) > 1:
                raise Stopped("this replica catches up more slowly than the others go on: it gives up")
            log.info("catching up starts anew from step %d", move.start)
            if self._ready:
                self._segments[-1].hole = step + 1
            self._kept = {s: kept for s, kept in self._kept.items() if self._ready}
            self._start, self._ready, self._tries = move.start, False, self._tries + 1
            self.fetch.begin(move.start)

    def _drive(self) -> None:
        engine = self.engine
        try:
            while not self._taken:
                request = engine.advance()
                assert not isinstance(request, ask.Compute), "a joiner that is not level owes nothing"
                if request is None:
                    break
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: the script's thread raises it
            self._error = error
        with self._news:
            self._over = not self._taken
            self._news.notify_all()

    # -- the script's thread ----------------------------------------------------------------------------------------
    def advance(self) -> ask.Begin | ask.Compute | ask.Commit | None:
        """Like `Engine.advance`: the steps to replay, then those of the run."""
        if self._begun:
            self._begun = False
            return self._replay()
        if self._pump is None:
            self._pump = threading.Thread(target=self._drive, name="recover-pump", daemon=True)
            self._pump.start()
        step = self._await()
        if step is None:
            return self._live()
        self._begun, self._next = True, step
        self.sums.begin(step)
        return ask.Begin(step, frozenset(), frozenset())

    def _await(self) -> int | None:
        """The next step to replay; None: there is none any more, the run goes on."""
        assert self._pump is not None
        while True:
            with self._news:
                error = self._error or self.fetch.error
                if error is not None:
                    raise error
                if self._next in self._kept:
                    self._awaits = -1
                    return self._next
                if self._taken or (self._over and self._next == self.engine.position.job.steps):
                    break
                if self._placed and self._next == self._segments[0].hole:
                    del self._segments[0]
                    self._placed = False
                if self._placed or not self._segments:
                    if self._over and self.engine.position.leave_asked:
                        break                           # told to go: it goes as it is
                    if self._over:
                        raise Stopped("the run ended before this replica had caught up")
                    self._awaits = self._next if self._placed and self._next is not None else -1
                    self._news.wait(self.engine.timeouts.heartbeat)
                    continue
                segment = self._segments[0]
            self._put(segment)
        self._pump.join()
        return None

    def _put(self, segment: Segment) -> None:
        """The copy in place: the script goes on from there."""
        assert segment.head.step == segment.start
        self.hands.load(segment.head, segment.data)
        self.engine.publisher.forget()
        with self._news:
            self._next, self._placed = segment.start, True
            segment.data = segment.data[:0]             # its memory is free

    def _replay(self) -> ask.Commit:
        """The sums of a kept step become `.grad`."""
        assert self._next is not None
        with self._news:
            kept = self._kept.pop(self._next)
        for b, parts in enumerate(kept.sums):
            for target, part in zip(self.sums.outputs(b), parts, strict=True):
                target.copy_(part)
        self.engine.missing = kept.missing
        self.engine.committed = self.engine.whole_step(self.sums, kept.shares, self.branch)
        self._next += 1
        return kept.request

    # -- level ------------------------------------------------------------------------------------------------------
    def _live(self) -> ask.Begin | ask.Compute | ask.Commit | None:
        self._live_now = True
        request = self.engine.advance()
        position = self.engine.position
        if isinstance(request, ask.Begin) and not (position.level or position.caught_up):
            self._verify(request.step)
        return request

    def _verify(self, step: int) -> None:
        """`step` begins: is this state the others'? Raises Diverged if it isn't."""
        fetch, position = self.fetch, self.engine.position
        if fetch.error is not None:
            raise fetch.error
        if self._mine is None:                          # a giver can't begin the next step without us: it hears in time
            self._compare_at(step + 1)
        elif step == self._mine[0]:
            copy = self.hands.take(step, None)
            threading.Thread(target=self._hash, args=(step, copy), daemon=True).start()
        checked, same = fetch.checked, False
        if checked is not None and checked[1] is None:
            self._compare_at(step + 1 + min(self._tries, catchup.PATIENCE))
            self._tries += 1
        elif checked is not None and self._hashed() == checked[0]:
            if checked != self._mine:
                raise Diverged(f"the state after catching up is not the others' at the beginning of step {checked[0]}: this "
                               "replica goes, and contributes to nothing")
            same = True
        if all(self.engine.agreed("verified", same)):
            speeds = [speed for speed in position.vectors[max(position.vectors)].values() if speed > 0]
            self.engine.publisher.paused = False
            position.caught_up, position.speed = True, sum(speeds) / len(speeds) if speeds else 1.0
            took = time.monotonic() - self._entered
            self.engine.record.emit(LEVEL, step=step, seconds=took)
            log.info("level at step %d, %.1f s after entering", step, took)

    def _compare_at(self, step: int) -> None:
        with self._news:
            self._mine = step, ""
        self.fetch.check(step)

    def _hashed(self) -> int | None:
        """The step for whose beginning the own hash is known."""
        with self._news:
            return self._mine[0] if self._mine is not None and self._mine[1] else None

    def _hash(self, step: int, copy: Snapshot) -> None:
        """(A thread of its own.)"""
        digest = copy.digest()
        with self._news:
            if self._mine == (step, ""):                # else it is another step's by now that is compared
                self._mine = step, digest


def compare(theirs: list[str], mine: list[str]) -> None:
    """Scripts and models must be alike. Raises ValueError that names the first difference."""
    if theirs == mine:
        return
    place = next((n for n, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine)))
    said, here = (texts[place] if place < len(texts) else f"{len(texts)} lines" for texts in (theirs, mine))
    raise ValueError(f"this replica can't join: the others have {said!r} where it has {here!r}")


