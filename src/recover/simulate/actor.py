"""One simulated position: answers the requests of a `Position` with the world's collectives, yielding at every event."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

from recover.errors import Stopped
from recover.protocol import requests as ask
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import NO_VIEW, View, ViewId
from recover.protocol.position import Position, Status
from recover.simulate.world import ENCODER, Op, Sum, World, check

Steps = Generator[None, None, Any]
Outcomes = Generator[None, None, ask.Outcome]


REQUESTS = (ask.Begin, ask.Relayout, ask.Compute, ask.Agree, ask.Form, ask.PostFence, ask.AwaitFence, ask.Reduce, ask.Commit,
            ask.Fenced, ask.Halt, ask.Exchange, ask.Reform, ask.Confirm, ask.Enter, ask.Entered, ask.Forward, ask.Decided,
            ask.Suspect, ask.Pause)


class Evicted(Exception):
    """The others went on without this one."""


class Died(Exception):
    """This one computed a microbatch that kills."""


class Actor:
    """Position 0 leads: it speaks with the coordinator. `p` is the position; `joining`: it was not there at the start.

    A joiner can't know that: half of them take themselves for first members till they hear otherwise, as all processes do.
    """

    def __init__(self, world: World, me: int, p: int, joining: bool = False,
                 position: Callable[..., Position] = Position) -> None:
        self.world, self.me, self.p, self.random = world, me, p, world.random
        self.joining = joining
        self.position = position(world.job, me, p, world.buckets, first=not joining or me % 2 == 0)
        self.position.chunk, self.position.speed = world.chunk, world.speed(me, -1)
        self.calls = 0
        self.sums: dict[int, Sum] = {}                      # reduced buckets of the step at hand
        self.held: tuple[int, dict[int, Sum]] = (-1, {})    # the same of the step before, until its fence
        self.local: set[int] = set()                        # microbatches in the local sums
        self.launched: dict[int, Op] = {}
        self.unconfirmed: tuple[ViewId, View] = (NO_VIEW, View())
        self.hurt = False
        self.answers = {kind: getattr(self, kind.__name__.lower()) for kind in REQUESTS}

    def run(self) -> Generator[None, None, None]:
        moves, answer = self.position.run(), None
        try:
            while True:
                request = moves.send(answer)
                answer = yield from self.answers[type(request)](request)
        except StopIteration:
            self.end()
        except (Evicted, Died):
            pass
        except Stopped as stopped:                          # a joiner that the others left behind
            check(any(self.world.endings.values()), "I3: stopped without a reason", self.me, stopped)

    def end(self) -> None:
        world, step = self.world, self.position.step
        if step is not None and not self.outside():
            world.finished.add(self.me)
            world.entry.setdefault(self.me, step)
            world.last[self.me] = step
            world.endings[self.me] = self.position.ending if step < world.job.steps else ""
            if step == world.job.steps:
                world.final = set(self.view.members)
                if self.p == 0 and world.up:
                    world.coordinator.finish(self.me)
                    world.deliver()

    def outside(self) -> bool:
        """A joiner that is in no view yet, or lost the one that was to let it in."""
        return self.position.step is None or (self.joining and self.view.id == NO_VIEW)

    @property
    def view(self) -> View:
        return self.position.view

    # -- hearing and waiting ----------------------------------------------------------------------------------------
    def look(self) -> None:
        """Hear from the coordinator, sooner or later."""
        world, c = self.world, self.world.coordinator
        if not world.up or self.random.random() > world.pace:
            return
        if world.rebuilding():
            self.announce()
        elif self.outside():
            if self.p == 0 and self.me not in c.view.members and self.me not in c.waiting and not self.pending_has_me():
                c.joined(self.me, world.endpoints(self.me))
                world.deliver()
            if c.view.id > self.view.id and self.me in c.view.members:
                self.position.news(c.view)
        elif c.view.id > self.view.id:
            if self.me not in c.view.members:
                raise Evicted
            self.unconfirmed = (c.view.id, c.view)
            self.position.news(c.view)
        elif c.pending and self.me in c.view.members:
            self.position.news(c.view, c.pending)

    def pending_has_me(self) -> bool:
        pending = self.world.coordinator.pending
        return pending is not None and self.me in pending.view.members

    def announce(self) -> None:
        """To a coordinator that came back: the newest view heard of, and whether its decision is confirmed here."""
        position, c = self.position, self.world.coordinator
        if self.p != 0:
            return
        if position.step is None or (position.view.id == NO_VIEW and self.unconfirmed[0] == NO_VIEW):
            c.joined(self.me, self.world.endpoints(self.me))
            self.world.deliver()
            return
        clean = position.clean and not position.switch and not position.pending
        if self.unconfirmed[0] > position.view.id:
            self.world.announce(self.me, Announcement(self.unconfirmed[1], False))
        else:
            self.world.announce(self.me, Announcement(position.view, clean))

    def key(self, kind: str, *name: int) -> tuple[Any, ...]:
        return (self.view.id, kind, *name, self.p)

    def give(self, value: object, kind: str, *name: int) -> Op:
        op = self.world.op(self.key(kind, *name), self.view.members)
        check(self.me in op.members, "I4: contributes to a view that it is not in", self.me, kind)
        op.given[self.me] = value
        return op

    def disturbed(self) -> bool:
        return self.position.latest > self.view.id or (self.outside() and self.stale())

    def stale(self) -> bool:
        """The view that was to let this joiner in is neither announced nor, by now, in force (others may be announced on it)."""
        c = self.world.coordinator
        announced = c.pending.view.id if c.pending else c.view.id
        return self.world.up and not self.world.rebuilding() and self.view.id not in (announced, c.view.id)

    def wait(self, op: Op) -> Steps:
        """Until the collective has succeeded (everyone's values) or failed (None) for this position."""
        while True:
            yield
            self.look()
            if self.world.budget["flap"] and self.random.random() < .004:
                self.world.budget["flap"] -= 1
                op.broken = True                            # a connection broke, nobody died
            if op.whole() and self.random.random() < .5:
                return dict(op.given)
            if (op.broken or any((m, self.p) in self.world.dead for m in op.members)) and self.random.random() < .5:
                self.hurt = True
                return None
            if self.disturbed() and self.random.random() < .3:
                op.broken = True
                return None

    # -- answers ----------------------------------------------------------------------------------------------------
    def agree(self, request: ask.Agree) -> Steps:
        """Values of all positions. If one died, the others wait here until they are ended."""
        self.calls += 1
        was, given = self.world.inner.setdefault((self.me, self.calls), (request.kind, {}))
        check(was == request.kind, "positions of one replica are at different places", was, request.kind)
        given[self.p] = request.value
        yield
        while len(given) < self.world.positions:
            self.look()
            if self.hurt and self.tells_at_once():
                self.world.suspect(self.view.id)
            yield
        return [given[p] for p in range(self.world.positions)]

    def tells_at_once(self) -> bool:
        """`atonce`: a failure is told to the coordinator before the replica has agreed on anything."""
        return True

    def begin(self, request: ask.Begin) -> Steps:
        world, position = self.world, self.position
        self.local = set()
        if request.step > position.decided:
            vector = position.vectors[max(s for s in position.vectors if s <= request.step)]
            seen = world.plans.setdefault((self.view.id, request.step), vector)
            check(seen == vector, "plans differ", self.me, self.p, request.step, seen, vector)
        yield

    def relayout(self, request: ask.Relayout) -> Steps:
        check(self.held[1] == {}, "the buffers of step 0 may still be needed")
        return self.world.learned
        yield

    def compute(self, request: ask.Compute) -> Steps:
        yield
        check(not self.local & set(request.indices), "computed twice", request)
        check(self.position.level, "computes without the parameters", self.me, request)
        check(len(self.view.members) >= self.world.job.floor, "goes on below the floor", self.me, self.view)
        self.tell(request)
        if self.world.poison & {(request.step, index) for index in request.indices}:
            raise Died
        self.local |= set(request.indices)
        if request.last and self.position.fence >= request.step - 1:    # else held until the fence has passed
            for b in range(self.position.buckets):
                if b not in self.sums:
                    self.launch(request.step, b, True)
                if self.random.random() < .2:
                    break

    def tell(self, request: ask.Compute) -> None:
        """The coordinator hears of what was taken over from the dead, in case this one dies of it."""
        if self.world.up:
            name = (request.step, request.indices[0]) if request.recomputed else None
            self.world.coordinator.hand(self.me, self.p, name)

    def launch(self, step: int, b: int, counted: bool) -> None:
        if b not in self.launched:
            self.launched[b] = self.give(self.contribution(counted), "sum", step, b)

    def contribution(self, counted: bool) -> object:
        """`settle`: what was launched stays as it was: sums change again only when the old operation let go of them."""
        return frozenset(self.local if counted else ())

    def reduce(self, request: ask.Reduce) -> Outcomes:
        if self.world.up:
            self.world.coordinator.hand(self.me, self.p, None)
        if self.launches_all_first():
            for b in request.buckets:
                self.launch(request.step, b, request.counted)
                if self.random.random() < .3:
                    yield
        for b in self.random.sample(request.buckets, len(request.buckets)):
            self.launch(request.step, b, request.counted)
            result = yield from self.wait(self.launched[b])
            if result is None:
                return ask.Outcome(frozenset(self.sums), False)
            self.take(request.step, b, result)
        return ask.Outcome(frozenset(self.sums), True)

    def launches_all_first(self) -> bool:
        """`order`: all buckets are launched in one order before any is waited for."""
        return True

    def take(self, step: int, b: int, result: dict[int, Any]) -> None:
        count = Counter(i for part in result.values() for i in part)
        wanted = set(range(self.world.job.total)) - self.world.job.skipped(step, self.position.skipped)
        check(count == Counter(wanted), "I1: not exactly once", self.me, self.p, step, b, count)
        self.sums[b] = tuple(sorted((m, tuple(sorted(part))) for m, part in result.items()))

    def commit(self, request: ask.Commit) -> Steps:
        for b, value in self.sums.items():
            self.world.committed.setdefault((request.step, self.p, b), {})[self.me] = value
        check(len(self.sums) == self.world.count(request.step), "committed with buckets missing", self.me, request.step)
        if self.position.level:
            self.world.level.add(self.me)
        if request.step == self.start:
            self.world.parameters[self.me] = self.started_from
        self.held, self.sums, self.launched = (request.step, self.sums), {}, {}
        self.position.caught_up = self.random.random() < .5
        self.position.speed = self.world.speed(self.me, request.step)
        return None
        yield

    def form(self, request: ask.Form) -> Steps:
        """All say which checkpoints they can read; the newest that all can is where the run begins."""
        result = yield from self.wait(self.give(self.world.readable(self.me), "form", request.root))
        if result is None:
            return None
        self.start = max(set.intersection(*result.values()))
        self.started_from = request.root
        self.world.start[self.me] = self.world.entry[self.me] = self.start
        self.inside = True
        return ask.Formed(self.start, self.world.count(self.start))

    start, started_from = -1, -1
    inside = False                                          # it has a first step

    def enters(self, step: int) -> None:
        """The first step of whoever did not form: a joiner, or a first member that slept till the run was under way."""
        if not self.inside and self.position.formed:
            self.inside, self.world.entry[self.me] = True, step

    def postfence(self, request: ask.PostFence) -> Steps:
        self.give(request.says, "fence", request.step)
        return None
        yield

    def awaitfence(self, request: ask.AwaitFence) -> Steps:
        return (yield from self.wait(self.world.ops[self.key("fence", request.step)]))

    def fenced(self, request: ask.Fenced) -> Steps:
        if request.step >= self.held[0]:
            self.held = (-1, {})
        return None
        yield

    # -- recovery ---------------------------------------------------------------------------------------------------
    def halt(self, request: ask.Halt) -> Steps:
        """What is whole and still arrives while the operations are joined counts; what comes later does not (`freeze`)."""
        yield
        for b, op in self.launched.items():
            if b not in self.sums and op.whole() and self.random.random() < .5 and request.step is not None:
                self.take(request.step, b, op.given)
        self.late, self.launched = (self.launched if not self.drops_late() else {}), {}
        return frozenset(self.sums)

    late: dict[int, Op] = {}

    def drops_late(self) -> bool:
        return True

    def exchange(self, request: ask.Exchange) -> Steps:
        world, sent = self.world, NO_VIEW
        while True:
            yield
            self.look()
            c = world.coordinator
            for view, reports in world.answers.items():     # an answer that was sent arrives, though a newer view may be known
                if view == sent and self.me in reports and self.random.random() < world.pace:
                    return ask.Answer(self.sent_view, reports)
            if not world.up or world.rebuilding():
                continue
            if c.view.id > request.view and self.me in c.view.members:
                if sent != c.view.id and self.random.random() < world.pace:
                    sent, self.sent_view = c.view.id, c.view        # the report itself may make a newer view
                    self.unconfirmed = (sent, c.view)
                    c.report(self.me, sent, ENCODER.encode(request.report))
                    world.deliver()
            elif (self.outside() and self.me not in c.view.members and c.pending and self.pending_has_me()
                  and c.pending.view.id > request.view):
                return ask.Answer(c.pending.view, None)
            else:
                world.suspect(self.view.id)

    sent_view = View()

    def reform(self, request: ask.Reform) -> Steps:
        """Connecting fails if a member is dead, and may fail for no reason; late results of the old view may come in."""
        yield
        self.hurt = False
        for b, op in self.late.items():
            if b not in self.sums and op.whole() and self.position.step is not None:
                self.take(self.position.step, b, op.given)
                self.position.reduced.add(b)
        self.late = {}
        dead = any((m, self.p) in self.world.dead for m in request.view.members)
        return not (dead and self.random.random() < .5)

    def confirm(self, request: ask.Confirm) -> Steps:
        return (yield from self.wait(self.give(None, "confirm"))) is not None

    def enter(self, request: ask.Enter) -> Steps:
        result = yield from self.wait(self.give(request.says, "enter"))
        if result is None:
            return None
        return next(said for said in result.values() if said)

    def entered(self, request: ask.Entered) -> Steps:
        """Only the joiner says so, once all its positions are in: till then a failure in the old view must be heard."""
        self.enters(request.step)
        if self.p == 0 and self.world.up:
            self.world.coordinator.entered(request.view)
        return None
        yield

    def forward(self, request: ask.Forward) -> Outcomes:
        """A holder gives and doesn't wait; who lacks takes."""
        world = self.world
        for b in request.gives:
            held = self.held[1] if self.held[0] == request.step else self.sums
            check(b in held, "I2: a bucket that was promised is gone", self.me, request.step, b)
            self.give(held[b], "forward", request.step, b)
        for b, source in request.takes.items():
            op = world.op(self.key("forward", request.step, b), self.view.members)
            while source not in op.given:
                yield
                self.look()
                if (source, self.p) in world.dead or self.disturbed():
                    return ask.Outcome(frozenset(self.sums), False)
            check(self.sums.get(b, op.given[source]) == op.given[source], "I2: forwarded another sum", request.step, b)
            self.sums[b] = op.given[source]
        return ask.Outcome(frozenset(self.sums), True)

    def decided(self, request: ask.Decided) -> Steps:
        self.enters(request.step)
        return None
        yield

    def pause(self, request: ask.Pause) -> Steps:
        while self.position.latest <= request.view and not self.position.wants_out():
            yield
            self.look()
            if self.position.pending:
                self.world.suspect(request.view)

    def suspect(self, request: ask.Suspect) -> Steps:
        self.world.suspect(request.view)
        return None
        yield


__all__ = ["Actor", "Evicted", "Status"]
