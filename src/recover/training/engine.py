"""Answers the requests of a `Position` with torch and sockets: the training loop's side of the protocol.

Theory of operation. The training thread pumps: `advance` sends the last answer into the position and handles whatever it
asks for next, until it asks for something that only the script can do: begin a step, compute a microbatch, take the sums
of a committed step. Everything is decided in `protocol/`; here it is carried out:

* Two other threads take part, and neither decides anything. The member thread hears of new views and *revokes* the
  group of the old one, so that whoever waits in a collective wakes up. The communication thread moves bytes, and
  tells the coordinator of a failure at once (`suspect`).
* Buckets are launched from hooks during the last backward. Each is launched *behind* the fence of the step before: the
  communication thread starts it when that has passed, so hooks never wait and `reduced` is not overwritten too early.
* `halt` is the handoff to recovery: revoke, join, and only then look which buckets are whole. After it nothing
  reads `local` or writes `reduced`.
"""
from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from recover import events
from recover.collectives.contract import Backend, Group, Work
from recover.config import Timeouts
from recover.errors import LEFT, CheckpointDamaged, CoordinatorLost, Evicted, PeerLost, Stopped, ViewChanged
from recover.faults.injector import Injector
from recover.gradients.buckets import Entry
from recover.gradients.layout import Learned
from recover.gradients.store import GradientStore
from recover.parallel.inner import NOTHING, Agreement, Share
from recover.parallel.mesh import Place
from recover.protocol import requests as ask
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import NO_VIEW, Report, Speed, Vector, View
from recover.protocol.position import Position
from recover.training import forming
from recover.training.giving import Giver
from recover.training.joining import Hands, Joiner, Welcome
from recover.training.managed import Managed
from recover.training.numbers import Kind, number
from recover.training.recovery import Publisher, Recovery
from recover.training.resuming import Resume
from recover.training.sums import Sums, Whole
from recover.workload import Speedometer

log = logging.getLogger("recover.training")

ENTRIES = msgspec.msgpack.Decoder(tuple[int, dict[int, Vector], tuple[int, int]])
REPORTS = msgspec.msgpack.Decoder(Report)
SPEEDS = msgspec.msgpack.Decoder(Speed)
ENCODER = msgspec.msgpack.Encoder()

SMOOTHING = 0.05
"""Of a replica's speed: about the last twenty microbatches count."""
LEAVE = 1.0
"""Seconds that a rank of a broken replica may take to leave by itself."""


@dataclass(frozen=True)
class Links:
    """How a rank reaches the others. `member` is a `membership.Member` (or `Solo`)."""

    member: Any
    backend: Backend
    inner: Agreement
    place: Place


class Engine:
    """One rank's protocol under way."""

    def __init__(self, links: Links, sums: Sums, managed: Managed, *, timeouts: Timeouts, injector: Injector,
                 record: events.Log) -> None:
        self.member, self.backend, self.inner, self.place = links.member, links.backend, links.inner, links.place
        self.sums, self.managed = sums, managed
        self.timeouts, self.injector, self.record = timeouts, injector, record
        self.publisher = Publisher(record)
        self.resume: Resume | None = None                   # where to begin, if not at step 0
        self.on_fenced: Callable[[int], None] = lambda step: None
        self.group: Group | None = None
        self.works: dict[int, Work[None]] = {}              # sums of the step at hand, launched in the present view
        self.whole: set[int] = set()                        # buckets of the step at hand that are whole here
        self.fences: dict[int, Work[dict[int, bytes]]] = {}
        self.lessons: Learned | None = None
        self.recovery: Recovery | None = None
        self.launching: ask.Compute | None = None
        self.speedometer = Speedometer(SMOOTHING)
        self.warm = False                                   # past the first step here, in which everything is slower
        self.told = False                                   # the coordinator knows of a microbatch that we are at
        self.given_out = 0                                  # microbatches that the script has in hand
        self.pipelined = False                              # the script takes its microbatches in chunks
        self.computed = 0                                   # microbatches of the step at hand, computed here
        self.recomputed = 0
        self.committed: Whole | None = None
        self.missing: frozenset[int] = frozenset()          # of the committed step: what nobody computed
        self.shares: list[Share] = []                       # of the step at hand, by position
        self.giver = Giver(lambda: self.hands, self.welcome, timeouts, record)
        self.hands: Hands | None = None                     # on the script's objects
        self.joiner: Joiner | None = None
        self.ready: Joiner | None = None                    # made while it waits to be let in
        self.keep: Callable[[ask.Commit], None] | None = None       # what becomes of a committed step while catching up
        self.mistake = ""                                   # this position's model is not like the other replicas'
        self.told_to_go = False                             # set by a signal handler, at any moment
        self.switching = False                              # from a view to one that was announced with the fence
        self.parting = False                                # past the last fence: others may close their connections
        self.needs_calibration = sums.store.reduction == "exact"     # before the first step only
        self.activity = links.member.activity               # what the heartbeats say of this thread
        self.leaving: threading.Timer | None = None
        self.closed = False
        self.moves: Iterator[Any] | None = None
        self.answer: Any = None
        self.member.on_view = self.on_view
        self.member.announcement = self.announcement
        self.handlers: dict[type, Callable[[Any], Any]] = {
            ask.Agree: self.agree, ask.Relayout: self.relayout, ask.Form: self.form, ask.PostFence: self.post_fence,
            ask.AwaitFence: self.await_fence, ask.Reduce: self.reduce, ask.Fenced: self.fenced, ask.Halt: self.halt,
            ask.Exchange: self.exchange, ask.Reform: self.reform, ask.Confirm: self.confirm, ask.Forward: self.forward,
            ask.Decided: self.decided, ask.Suspect: self.suspect, ask.Pause: self.pause, ask.Enter: self.enter,
            ask.Entered: self.entered}

    def start(self, position: Position, count: int | None, script: Sequence[str] = ()) -> None:
        """`count`: the microbatches in every step; None if the policy lets the batch shrink. `script`: what all replicas'
        scripts must have alike."""
        self.position, self.count, self.script = position, count, script
        self.moves, self.answer = position.run(), None

    # -- the pump ---------------------------------------------------------------------------------------------------
    def advance(self) -> ask.Begin | ask.Compute | ask.Commit | None:
        """The next thing that only the script can do; None when the run is over. Raises what ends a run."""
        assert self.moves is not None
        self.clock_in()
        while True:
            self.activity.turn("run")
            self.listen()
            try:
                request = self.moves.send(self.answer)      # type: ignore[attr-defined]
            except StopIteration:
                return None
            self.answer = None
            if isinstance(request, ask.Begin):
                if not self.needs_calibration:
                    self.sums.begin(request.step)
                self.works, self.whole, self.computed, self.recomputed = {}, set(), 0, 0
                self.activity.turn("begin")
                if self.position.level:
                    self.giver.at(request.step)
                return request
            if isinstance(request, ask.Compute):
                self.activity.turn("compute")
                for n in range(len(request.indices)):
                    self.injector.at("compute", request.step, self.computed + n)
                if request.recomputed:
                    self.injector.at("recompute", request.step)
                self.tell(request)
                self.launching = request
                self.sums.before_forward(request.last, self.pipelined)
                self.given_out = len(request.indices)
                return request
            if isinstance(request, ask.Commit):
                self.commit(request)
                return request
            self.answer = self.handlers[type(request)](request)

    def clock_in(self) -> None:
        """The script is back: what it took for its microbatches, with all that it does for one, is this replica's speed."""
        count, self.given_out = self.given_out, 0
        for _ in range(count if self.warm else 0):
            self.speedometer.add((time.monotonic() - self.since) / count)
            self.position.speed = self.speedometer.speed()

    def listen(self) -> None:
        """Hear from the coordinator. Raises Evicted."""
        if self.member.evicted:
            raise Evicted(f"the others went on without replica {self.position.me}; it contributes to nothing any more")
        self.position.leave_asked = self.position.leave_asked or self.told_to_go
        self.position.news(self.member.latest, self.member.pending)

    def on_view(self, view: View) -> None:
        """(Member thread.) A newer view: whatever waits in a collective of an older one must wake up."""
        self.notice(None)
        self.backend.abandon(view.id)
        if self.position.me not in view.members or self.member.evicted:
            self.leave_at_once()
        group = self.group
        if group is not None and group.view < view.id:
            group.revoke()

    def leave_at_once(self) -> None:
        """(Member thread.) The others went on without this replica. The training thread may be where nothing wakes it up: in
        a collective of torch's that waits for a dead mate, or hung."""
        self.inner.revoke()
        if self.leaving is None and not self.closed:
            patience = LEAVE if self.place.ranks > 1 else 2 * self.timeouts.failure_timeout
            self.leaving = threading.Timer(patience, self.left)
            self.leaving.daemon = True
            self.leaving.start()

    def left(self) -> None:
        """(Timer's thread.) It did not wake up."""
        if not self.closed:
            log.error("the others went on without replica %d, and its training thread does not notice: exit code %d",
                      self.position.me, LEFT)
            os._exit(LEFT)

    def on_loss(self, loss: PeerLost) -> None:
        """(Communication thread.) Told to the coordinator at once, before anything is agreed on."""
        self.notice(loss)
        group = self.group
        if group is not None and not self.parting and not self.switching:
            self.member.suspect(group.view, loss.reason, loss.peer, loss.unheard)

    def notice(self, loss: PeerLost | None) -> None:
        """The first evidence of a failure starts the clock of a recovery."""
        if self.position.view.id == NO_VIEW or self.parting or self.switching:
            return
        recovery = self.recovery
        if recovery is None:
            recovery = self.recovery = Recovery()
        if recovery.evidence is None:
            recovery.evidence = time.monotonic()
        recovery.lost = recovery.lost or loss

    def announcement(self) -> Announcement:
        """(Member thread.) For a coordinator that came back: the newest view heard of, and whether we acted on it."""
        position, latest = self.position, self.member.latest
        if latest.id > position.view.id:
            return Announcement(latest, False)
        return Announcement(position.view, position.clean and not position.switch and not position.pending)

    # -- the script's part ------------------------------------------------------------------------------------------
    def calibrated(self, step: int) -> None:
        """The exponents of `exact` are set: the first step begins, with empty sums."""
        self.needs_calibration = False
        self.sums.begin(step)

    def handed_out(self) -> None:
        """The script gets its microbatch: from here on the time is the microbatch's."""
        self.since = time.monotonic()

    @contextmanager
    def microbatch(self) -> Iterator[Entry]:
        """Around the script's backward."""
        request = self.launching
        assert request is not None
        wanted = frozenset(range(self.sums.count)) - self.whole
        launch = (lambda b: self.launch(request.step, b, True)) if request.last else None
        with self.sums.microbatch(request.indices, self.position.me, launch, wanted) as entry:
            yield entry
        self.launching = None
        self.computed += len(request.indices)
        self.recomputed += request.recomputed
        if self.recovery is not None and request.recomputed:
            self.recovery.recomputed += request.recomputed
            self.recovery.add("recompute", self.since)

    def launch(self, step: int, b: int, counted: bool) -> None:
        """Enqueue the sum of a bucket behind the fence of the step before. Any thread of autograd; never waits."""
        held = self.injector.planned("reduce", step)
        if b in self.works or b in self.whole or (held is not None and len(self.works) >= held):
            return
        assert self.group is not None
        inputs = self.sums.inputs(b) if counted else self.sums.zeros(b)
        self.works[b] = self.group.all_reduce(number(Kind.SUM, step, b), inputs, self.sums.outputs(b),
                                              after=self.fences.get(step - 1))

    def commit(self, request: ask.Commit) -> None:
        """Every bucket is whole on every position: `.grad` becomes the step's gradient."""
        since = time.monotonic()
        if self.keep is not None:
            self.keep(request)
        else:
            self.missing = self.put_aside(request.step)
            self.committed = self.whole_step(self.sums, self.shares, self.inner)
            self.warm = True
        self.works, self.whole = {}, set()
        recovery = self.recovery
        if recovery is not None and recovery.views:
            recovery.add("commit", since)
            self.record.emit(events.RECOVERY, view=request.view, step=request.step,
                             **msgspec.structs.asdict(recovery.event()))
            self.recovery = None
        self.activity.turn("update")
        self.injector.at("optimizer", request.step)

    def put_aside(self, step: int) -> frozenset[int]:
        """The microbatches of `step` that nobody computes."""
        return self.position.job.skipped(step, self.position.skipped)

    def whole_step(self, sums: Sums, shares: Sequence[Share], inner: Agreement) -> Whole:
        """`.grad` of whole sums, on all positions alike."""
        count = None if self.count is None else self.count - len(self.missing)
        whole = sums.commit(count, [shares[p] for p in self.place.speakers()])
        if whole.gradient.learned is not None:
            self.lessons = whole.gradient.learned
        return self.commit_alike(sums.store, whole, inner) if self.place.ranks > 1 else whole

    def commit_alike(self, store: GradientStore, whole: Whole, inner: Agreement) -> Whole:
        """What one position found counts for all: a gradient that is not finite, a parameter that nothing used."""
        unused = store.unused(whole.gradient)
        given = self.agreed("found", (whole.nonfinite, unused), inner)
        said = [text for text, _ in given if text]
        doubtful = {name for _, names in given for name in names}
        if doubtful:
            mine = [name for name in sorted(doubtful & whole.gradient.used.keys()) if name not in unused]
            store.drop(doubtful - {name for names in self.agreed("used", mine, inner) for name in names})
        return replace(whole, nonfinite=said[0] if said else "")

    def agreed(self, kind: str, value: Any, inner: Agreement | None = None) -> list[Any]:
        """Everyone's values in this replica. `inner`: another one of a script that replays while others are not kept waiting."""
        if inner is not None and inner is not self.inner:
            return inner.agree(kind, value)
        with self.activity.waiting():
            return self.inner.agree(kind, value)

    # -- handlers: a step -------------------------------------------------------------------------------------------
    def agree(self, request: ask.Agree) -> list[Any]:
        if request.kind == "complete" and self.position.step is not None:
            self.injector.at("complete", self.position.step)
            value: Any = request.value
            ok, says = value
            given = self.agreed("complete", (ok, says, self.sums.share() if ok else NOTHING))
            self.shares = [share for _, _, share in given]
            return [(fine, said) for fine, said, _ in given]
        if request.kind == "answer" and self.place.rank > 0 and self.recovery is not None and self.position.step is not None:
            self.injector.at("exchange", self.position.step)        # this rank waits for what its leader exchanges
        if request.kind == "formed":
            with self.activity.waiting():
                return forming.agree(self.inner, bool(request.value), self.mistake)
        return self.agreed(request.kind, request.value)

    def relayout(self, request: ask.Relayout) -> int:
        if self.lessons is not None:
            self.sums.store.adopt(self.lessons)
            self.sums.store.release()
        return self.sums.count

    def form(self, request: ask.Form) -> ask.Formed | None:
        assert self.group is not None
        self.ready = None                                   # not late after all
        try:
            with self.activity.waiting():
                forming.compare(self.group, self.script, self.model(), self.timeouts.drain)
                resumes = self.resume is not None and self.resume.choose(self.group, self.timeouts.drain)
            if self.resume is not None and resumes:
                with self.activity.pause("reading a checkpoint"):
                    self.resume.load(self.managed, self.sums.store)
                self.lessons, self.needs_calibration = self.sums.store.learned, False
            with self.activity.waiting():
                forming.take_over(self.group, self.managed.first_values(), request.root)
        except PeerLost:
            return None
        except (ValueError, CheckpointDamaged) as mistake:
            self.mistake = str(mistake)                     # for the agreement that follows: all positions raise it
        return ask.Formed(self.resume.start if self.resume is not None else 0, self.sums.count)

    def passes(self, step: int) -> bool:
        """Wait for the fence of `step`, posted at its commit, ahead of time. False: not within the failure timeout."""
        fence = self.fences.get(step)
        try:
            with self.activity.waiting():
                return fence is not None and fence.wait(self.timeouts.failure_timeout) is not None
        except (PeerLost, TimeoutError):
            return False

    def post_fence(self, request: ask.PostFence) -> None:
        if request.step >= 0:
            self.injector.at("fence", request.step)
        assert self.group is not None
        self.fences[request.step] = self.group.gather(number(Kind.FENCE, request.step), ENCODER.encode(request.says))

    def await_fence(self, request: ask.AwaitFence) -> dict[int, Speed] | None:
        try:
            with self.activity.waiting():
                given = self.fences[request.step].wait()
        except PeerLost as loss:
            self.notice(loss)
            return None
        says = {m: SPEEDS.decode(said) for m, said in given.items()}
        if len({said.digest for said in says.values() if said.digest}) > 1:     # the end of the run: let all hear of it
            assert self.group is not None
            with self.activity.waiting():
                forming.farewell(self.group, number(Kind.PART, 1), self.timeouts.drain)
        return says

    def tell(self, request: ask.Compute | None) -> None:
        """What was taken over from the dead is told before it is computed: should this replica die of it, too, it is known."""
        name = (request.step, request.indices[0]) if request is not None and request.recomputed else None
        if name is not None or self.told:
            self.member.hand(name)
            self.told = name is not None

    def reduce(self, request: ask.Reduce) -> ask.Outcome:
        """Wait for every bucket; in `exact`, then for the coarse parts of those that need them (the same on all)."""
        self.tell(None)
        since = time.monotonic()
        if self.recovery is not None and self.recovery.views:
            self.injector.at("redo", request.step)
        self.sums.flush(self.position.me)
        for b in request.buckets:
            self.launch(request.step, b, request.counted)
        self.hold_back(request.step)
        ok = self.wait_for(request.step, request.buckets, request.counted)
        if self.recovery is not None and self.recovery.views:
            self.recovery.add("redo", since)
        return ask.Outcome(frozenset(self.whole), ok)

    def hold_back(self, step: int) -> None:
        """A planned fault at `reduce:k`: k buckets are reduced, the others were never launched here."""
        planned = self.injector.planned("reduce", step)
        if planned is None:
            return
        for b in sorted(self.works):
            self.settle(step, b)
        self.injector.at("reduce", step, planned)

    def wait_for(self, step: int, buckets: tuple[int, ...], counted: bool) -> bool:
        try:
            for b in buckets:
                self.launch(step, b, counted)               # what a fault held back
                with self.activity.waiting():
                    self.works[b].wait()
            coarse = [(b, self.group.all_reduce(number(Kind.COARSE, step, b, level), given, taken))
                      for b in buckets for level, (given, taken) in enumerate(self.sums.extra_levels(b))
                      if self.group is not None]
            with self.activity.waiting():
                for _, work in coarse:
                    work.wait()
        except PeerLost as loss:
            self.notice(loss)
            return False
        for b in buckets:
            self.sums.fold(b)
            self.whole.add(b)
        return True

    def settle(self, step: int, b: int) -> None:
        try:
            with self.activity.waiting():
                self.works[b].wait()
        except PeerLost as loss:
            self.notice(loss)

    def fenced(self, request: ask.Fenced) -> None:
        self.publisher.publish(request.step)
        self.on_fenced(request.step)
        for past in [s for s in self.fences if s < request.step]:
            del self.fences[past]
        if request.step == self.position.job.steps - 1:
            self.part()

    def part(self, patience: float | None = None) -> None:
        """The finish line. Whoever goes first would tear the fence of those who still wait for a third one's part of it."""
        self.parting = True
        if self.group is not None:
            with self.activity.waiting():
                forming.farewell(self.group, number(Kind.PART, 0), self.timeouts.drain if patience is None else patience)

    # -- handlers: recovery -----------------------------------------------------------------------------------------
    def halt(self, request: ask.Halt) -> frozenset[int]:
        """Revoke and join every operation of the view; what is whole now counts, what comes later does not."""
        self.halted = time.monotonic()
        if self.group is not None:
            self.group.revoke()
            self.group.join(self.timeouts.drain)
        for b, work in self.works.items():
            if b not in self.whole and self.succeeded(work) and not self.sums.extra_levels(b):
                self.sums.fold(b)
                self.whole.add(b)
        self.works, self.fences = {}, {}
        return frozenset(self.whole)

    @staticmethod
    def succeeded(work: Work[None]) -> bool:
        try:
            work.wait(0)
        except (PeerLost, TimeoutError):
            return False
        return True

    def exchange(self, request: ask.Exchange) -> ask.Answer:
        """The same report in one view after another, until the members of one have all sent theirs."""
        step = request.report.step
        if step is not None and self.recovery is not None:
            self.injector.at("exchange", step)
        payload, since = ENCODER.encode(request.report), time.monotonic()
        after = request.view
        while True:
            try:
                view = self.announced(after) if step is None or request.report.fresh else None
                if view is not None:
                    return ask.Answer(view, None)
                with self.activity.waiting():
                    view = self.await_view(after)
                if self.recovery is not None:
                    self.recovery.add("detect", since)
                since = time.monotonic()
                with self.activity.waiting():
                    answers = self.member.exchange(view.id, payload, self.timeouts.coordinator)
            except ViewChanged:
                continue
            except CoordinatorLost as lost:
                log.warning("the coordinator is away, this recovery waits for it: %s", lost)
                after = max(after, self.member.latest.id) if self.member.latest.id == NO_VIEW else after
                continue
            except TimeoutError as late:
                raise Stopped(f"a recovery did not come to its end: {late}") from None
            reports = {m: REPORTS.decode(part) for m, part in answers.items()}
            if self.recovery is not None:
                self.recovery.add("exchange", since)
            at = {r.step for r in reports.values() if r.step is not None}
            self.parting = at == {self.position.job.steps} and any(r.formed for r in reports.values())
            return ask.Answer(view, reports)

    def await_view(self, after: tuple[int, int]) -> View:
        """A view newer than `after`; asks for one again now and then, since a suspicion may have been lost on the way."""
        while True:
            try:
                return self.member.wait_view(after, self.timeouts.heartbeat * 2)    # type: ignore[no-any-return]
            except TimeoutError:
                if after == NO_VIEW and self.announced(after) is not None:
                    raise ViewChanged("a view was announced with the fence") from None
                if after > NO_VIEW:
                    self.member.suspect(after, "no new view came", None)

    def announced(self, after: tuple[int, int]) -> View | None:
        """The view, newer than `after`, that is to let this joiner in with the fence.

        None if it is in a view already that is newer than `after`: there others wait for its report, whatever is announced on
        top of that.
        """
        pending = self.member.pending
        if pending is None or self.member.latest.id > after:        # in this order: what was announced last was heard last
            return None
        return pending.view if pending.view.id > after else None

    def reform(self, request: ask.Reform) -> bool:
        since = time.monotonic()
        self.listen()
        if self.parting:                                    # everyone is past the last step: nobody needs a group
            self.group = None
            return True
        view, before = request.view, self.group.members if self.group is not None else ()
        try:
            with self.activity.waiting():
                self.let_go()
                group = self.form_group(view)
        except PeerLost as loss:
            self.group = None
            log.info("view %s could not be formed: %s", view.id, loss)
            self.member.suspect(view.id, loss.reason, loss.peer, loss.unheard)
            return False
        self.group = group
        group.on_loss = self.on_loss
        if self.member.latest.id > view.id:                 # pushed before the group was ours to revoke
            group.revoke()
        if self.recovery is not None:
            self.recovery.views += 1
            self.recovery.add("reform", since)
        self.record.emit(events.VIEW_NEW, view=view.id, step=self.position.step, members=view.members,
                         joined=tuple(m for m in view.members if m not in before),
                         gone=tuple(m for m in before if m not in view.members))
        return True

    def let_go(self) -> None:
        """A view that ends in order, since another was announced with the fence: nobody may close its connections before
        all have passed its last fence. Whoever sees them closed has passed it too."""
        if self.group is None or self.group.lost is not None:
            return
        self.switching = True
        try:
            self.group.gather(number(Kind.PART, 2), b"").wait()
        except PeerLost as loss:
            log.debug("others switched already, or someone is lost: %s", loss)
        self.group.revoke()
        self.group.join(self.timeouts.drain)
        self.switching = False

    def form_group(self, view: View) -> Group:
        """Raises PeerLost. A joiner that the fence lets in waits for the others to come, some step's time."""
        position = self.position
        while True:
            joins = position.step is None and view.id > self.member.latest.id
            if joins and self.ready is None:                # what takes time now takes it from nobody
                self.ready = self.make_joiner()
            limit = self.timeouts.coordinator if joins else self.timeouts.connect
            try:
                return self.backend.form(view, position.position, position.me, limit)
            except PeerLost as loss:
                if not joins or self.member.latest.id > view.id:
                    raise
                log.info("not let in yet: %s", loss)
            try:
                self.member.wait_view(view.id, self.timeouts.heartbeat)
            except TimeoutError:
                continue

    def make_joiner(self) -> Joiner:
        assert self.hands is not None
        return Joiner(self, self.hands)

    def enter(self, request: ask.Enter) -> tuple[int, dict[int, Vector], tuple[int, int]] | None:
        """The first message in a view that was announced with the fence."""
        assert self.group is not None
        said = b"" if request.says is None else ENCODER.encode(request.says)
        try:
            with self.activity.waiting():
                given = self.group.gather(number(Kind.ENTER, 0), said).wait()
        except PeerLost as loss:
            self.notice(loss)
            return None
        says: tuple[int, dict[int, Vector], tuple[int, int]] = ENTRIES.decode(next(part for part in given.values() if part))
        step, vectors, buckets = says
        return says if self.opened(step, vectors, buckets[0]) else None

    def entered(self, request: ask.Entered) -> None:
        self.member.entered(request.view)

    def opened(self, step: int, vectors: Mapping[int, Vector], layout: int) -> bool:
        """The view stands: members give state to joiners, a joiner asks for it. False: it fell again."""
        group, position = self.group, self.position
        assert group is not None
        vector = vectors[max(vectors)] if vectors else {}
        level = tuple(m for m in group.members if vector.get(m))
        if position.level:
            self.giver.open(group, [m for m in group.members if m not in level and m != group.me])
            return True
        if self.joiner is None:
            self.joiner, self.ready = self.ready or self.make_joiner(), None
            self.keep = self.joiner.keep
        with self.activity.waiting():
            return self.joiner.open(group, level, step, layout)

    def confirm(self, request: ask.Confirm) -> bool:
        since = time.monotonic()
        if self.group is None:
            return False
        try:
            with self.activity.waiting():
                self.group.gather(number(Kind.CONFIRM, 0), b"").wait()
        except PeerLost as loss:
            self.notice(loss)
            return False
        if self.recovery is not None:
            self.recovery.add("exchange", since)
        position = self.position
        return position.step is None or not position.formed or self.opened(position.step, position.vectors, position.layout)

    def forward(self, request: ask.Forward) -> ask.Outcome:
        """Whole buckets, from the first who holds one to those who lack it."""
        assert self.group is not None
        self.injector.at("forward", request.step)
        since = time.monotonic()
        for b, lacking in request.gives.items():
            for m in lacking:
                self.group.send(number(Kind.FORWARD, request.step, b), self.sums.outputs(b), m)
        taken = {b: self.group.receive(number(Kind.FORWARD, request.step, b), self.sums.outputs(b), source)
                 for b, source in request.takes.items()}
        ok = True
        for b, work in taken.items():
            try:
                with self.activity.waiting():
                    work.wait()
                self.whole.add(b)
            except PeerLost as loss:
                self.notice(loss)
                ok = False
        if self.recovery is not None:
            self.recovery.add("redo", since)
        return ask.Outcome(frozenset(self.whole), ok)

    def decided(self, request: ask.Decided) -> None:
        if self.recovery is not None:
            self.recovery.lost_microbatches |= request.lost
            self.recovery.forwarded += request.forwarded
            self.recovery.redone += request.redone

    def suspect(self, request: ask.Suspect) -> None:
        loss = self.group.lost if self.group is not None else None
        if self.position.wants_out():
            return self.member.suspect(request.view, "a replica was told to go")  # type: ignore[no-any-return]
        self.member.suspect(request.view, *((loss.reason, loss.peer, loss.unheard) if loss else ("an operation failed",)))

    def pause(self, request: ask.Pause) -> None:
        """Too few members: until there are more, or this replica is told to go."""
        log.warning("the run waits: it has %d replicas, and goes on with %d", len(self.position.view.members),
                    self.position.job.floor)
        while not (self.told_to_go or self.position.wants_out()):
            try:
                with self.activity.waiting():
                    self.member.wait_view(request.view, self.timeouts.heartbeat)
                return
            except TimeoutError:
                if self.member.pending is not None:
                    self.member.suspect(request.view, "a joiner waits, and no fence will let it in", None)

    # -- joiners ----------------------------------------------------------------------------------------------------
    def model(self) -> list[str]:
        """What all replicas' models must have alike."""
        return [": ".join(part) for part in (*self.sums.store.signature(), *self.sums.buffers.signature())]

    def alike(self) -> list[str]:
        return [*self.script, *self.model()]

    def welcome(self) -> bytes:
        return ENCODER.encode(Welcome(self.alike(), self.sums.store.learned or self.lessons))

    # -- the end ----------------------------------------------------------------------------------------------------
    def close(self, finished: bool, together: bool = False) -> None:
        """Leave in order: whoever finished is no casualty. `together`: all ranks of the replica do."""
        self.closed = True
        self.activity.stop()
        if self.leaving is not None:
            self.leaving.cancel()
        if finished:
            self.member.finish()
        else:
            self.member.leave()
        if self.group is not None:
            self.group.close()
        self.inner.close(self.timeouts.drain if finished or together else 0)
        self.sums.store.close()
