"""One position of one replica through all its steps and recoveries: the state machine of DESIGN 3.2.

Theory of operation. `run()` alternates between two moves until the run is over:

* `attempt`: take the step at hand as far as it goes: compute what is owed, pass the fence of the step before, reduce the
  buckets, agree inside the replica that all is whole, post the fence, commit;
* `recover`: halt, report, learn the new view and everyone's reports, `decide`, confirm, forward whole buckets.

`attempt` gives up (False) at the first sign of trouble: a collective failed, or a newer view is known. Nothing is
rolled back: what was computed and what was reduced stays, and the next `attempt` goes on from there.

Whoever is told to go (`leave_asked`, at any position of the replica) makes trouble too, once: the recovery that follows
hands back what it has not computed, and lets it go after the step at hand.

State of the step at hand: `owes` and `shadow` (per step: what counts, what doesn't), `done`, `reduced` (buckets that are
whole here). `fence` is the newest step whose fence is known to have succeeded; -1 stands for the first parameters, and
-2 for "not even those are known to be everywhere". `vectors` maps a step to what the fences say from it on.

Every rule is a method that says its name, so that a test double can leave it out and see the simulation fail.
"""
from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from recover.errors import Diverged
from recover.protocol.decision import Decision, Ending, Job, decide
from recover.protocol.messages import NO_VIEW, Name, Pending, Report, Speed, Vector, View
from recover.protocol.requests import (
    Agree,
    Answer,
    AwaitFence,
    Begin,
    Commit,
    Compute,
    Confirm,
    Decided,
    Enter,
    Entered,
    Exchange,
    Fenced,
    Form,
    Formed,
    Forward,
    Halt,
    Outcome,
    Pause,
    PostFence,
    Reduce,
    Reform,
    Relayout,
    Suspect,
)

Moves = Generator[Any, Any, bool]
"""Yields requests, is sent their answers, and returns whether all went well."""


@dataclass(frozen=True)
class Status:
    """What a position tells its leader before the report."""

    step: int | None
    reduced: frozenset[int]
    buckets: tuple[int, int]
    formed: bool
    vectors: dict[int, Vector]
    leaving: bool


class Position:
    """Sans-I/O; `news()` may be called between any two requests. `first`: a member of the first view of the run."""

    def __init__(self, job: Job, me: int, position: int, buckets: int, *, first: bool) -> None:
        self.job, self.me, self.position = job, me, position
        self.buckets, self.layout = buckets, 0
        self.view, self.latest = View(), NO_VIEW
        self.pending: Pending | None = None
        self.step: int | None = 0 if first else None
        self.level = first
        self.caught_up = False                              # a joiner's driver says so; then it is level by its next commit
        self.fence, self.decided = -2, -1
        self.posted = -2                                    # the newest fence posted in the present view
        self.vectors: dict[int, Vector] = {}
        self.owes: dict[int, set[int]] = {}
        self.shadow: dict[int, set[int]] = {}
        self.done: set[int] = set()
        self.extra: set[tuple[int, int]] = set()            # (step, index) taken over from the dead
        self.skipped: frozenset[Name] = frozenset()         # put aside by a decision
        self.reduced: set[int] = set()
        self.begun = -1
        self.leave_asked = False                            # whoever drives this says so, at any time
        self.leave_said = False                             # the others have been told
        self.leave_after: int | None = None
        self.ending: Ending = ""                            # why all go, if they do
        self.pause_at: int | None = None                    # the step that waits for more members
        self.trouble = True                                 # the first view is found like any other: by a recovery
        self.clean = False
        self.over = False
        self.chunk = 1                                      # microbatches that are computed at one go, at most
        self.speed = 1.0                                    # microbatches per second; whoever drives this measures it
        self.digest = ""                                    # of the state after the newest step that was hashed
        self.says = Speed(1.0)
        self.switch: dict[int, Pending] = {}                # step at whose launch a pending view takes over

    # -- news -------------------------------------------------------------------------------------------------------
    def news(self, view: View, pending: Pending | None = None) -> None:
        """The coordinator pushed a view, or announced one."""
        self.latest = max(self.latest, view.id)
        if pending and pending.base == self.view.id and self.step is not None:
            self.pending = pending

    def disturbed(self) -> bool:
        return self.trouble or self.latest > self.view.id or self.wants_out()

    def wants_out(self) -> bool:
        """Told to go, and the others don't know it yet."""
        return self.leave_asked and not self.leave_said

    @property
    def formed(self) -> bool:
        return self.fence >= -1

    @property
    def catching_up(self) -> bool:
        """In the view, but without the parameters: a joiner that is not level yet."""
        return self.step is not None and self.formed and not self.level

    def givers(self, step: int | None = None) -> tuple[int, ...]:
        """Members with a quota by the newest vector known, or by the one for `step`: they hold the parameters."""
        known = [s for s in self.vectors if step is None or s <= step]
        vector = self.vectors[max(known)] if known else {}
        return tuple(m for m in self.view.members if vector.get(m))

    # -- the run ----------------------------------------------------------------------------------------------------
    def run(self) -> Generator[Any, Any, None]:
        well = False
        while not self.over:
            if well and self.paused():
                yield Pause(self.view.id)
                well = False
            else:
                well = (yield from self.attempt()) if well else (yield from self.recover())

    def paused(self) -> bool:
        """`floor`: no step is begun, or gone on with, by fewer members than the job wants. (They do form: where the run begins
        is where it ends, for a checkpoint of its last step.)"""
        return self.formed and self.pause_at is not None and self.step == self.pause_at and not self.leaves(self.step)

    def leaves(self, step: int) -> bool:
        return self.leave_after is not None and step > self.leave_after

    # -- a step -----------------------------------------------------------------------------------------------------
    def plan(self, step: int) -> None:
        if step not in self.owes:
            vector = self.vectors[max(s for s in self.vectors if s <= step)]
            plan = self.job.policy.plan(vector, step, self.job.total)
            skipped = self.job.skipped(step, self.skipped)
            self.owes[step] = set(plan.work.get(self.me, ())) - skipped
            self.shadow[step] = set(plan.shadow.get(self.me, ())) - skipped

    def attempt(self) -> Moves:
        """Take the step at hand as far as it goes; False: recover."""
        if self.ends_unformed():
            return (yield from self.exit(not self.trouble))
        if not self.formed:
            return (yield from self.form())
        assert self.step is not None
        step = self.step
        if not self.trouble and self.fence < step - 1 and self.waits_early(step):
            self.trouble = not (yield from self.pass_fence(step - 1))
        leaving = step == self.job.steps or self.leaves(step)
        if step < self.job.steps and not leaving and not (yield from self.compute(step)):
            return False
        ok = not self.trouble
        if ok and self.fence < step - 1 and self.fenced_launch(leaving):
            ok = yield from self.pass_fence(step - 1)
        if leaving:
            return (yield from self.exit(ok))
        if ok and step in self.switch:
            ok = yield from self.enter_pending(self.switch.pop(step))
        if ok:
            missing = tuple(b for b in range(self.buckets) if b not in self.reduced)
            outcome: Outcome = yield Reduce(step, missing, counted=not self.shadow[step])
            self.reduced |= outcome.reduced
            ok = outcome.ok
        return (yield from self.complete(step, ok))

    def ends_unformed(self) -> bool:
        """`unbegun`: a job that ends before it has formed ends at once: forming would teach only some where it begins."""
        return bool(self.ending) and not self.formed

    def exit(self, ok: bool) -> Moves:
        self.over = all((yield Agree("exit", ok)))
        return self.over

    def form(self) -> Moves:
        """Take over the first parameters, and know that everyone has: the fence of the step before the first (-1, or that
        of the checkpoint). Whoever passes it proves that every member has formed, hence knows the first step."""
        assert not self.done, "nothing is computed before the first parameters are everywhere"
        formed: Formed | None = None
        if not self.trouble:
            formed = yield Form(min(self.view.members))
        if not all((yield Agree("formed", formed is not None))):
            return False
        assert formed is not None
        self.begin_at(formed.start, formed.buckets)
        ok = yield from self.pass_fence(formed.start - 1)
        return all((yield Agree("began", ok)))

    def begin_at(self, start: int, buckets: int) -> None:
        """`start`: a resumed run begins where its checkpoint ends, with buckets laid out as step 0 taught."""
        self.step, self.buckets, self.layout = start, buckets, min(start, 1)
        self.leave_after = self.counted_from(start, self.leave_after)
        self.pause_at = self.counted_from(start, self.pause_at) if start < self.job.steps else None

    def counted_from(self, start: int, step: int | None) -> int | None:
        """`first`: what was decided while nobody knew the first step holds for the first step, whichever it is."""
        return None if step is None else start

    def waits_early(self, step: int) -> bool:
        """Step 1 lays out its buckets as learned in step 0, which takes over the buffers that peers may still need."""
        return step == 1 and self.layout == 0

    def compute(self, step: int) -> Moves:
        """Microbatch after microbatch (or chunk); before each the positions agree whether to go on (`turn`)."""
        self.plan(step)
        work = self.owes[step] | self.shadow[step]
        if self.waits_early(step) and self.fence >= 0:
            self.buckets, self.layout = (yield Relayout()), 1
        if self.begun != step:
            self.begun = step
            yield Begin(step, frozenset(self.owes[step]), frozenset(self.shadow[step]))
        if not work and any((yield from self.turn())):      # a spare is told to go, too
            return False
        while work - self.done:
            if any((yield from self.turn())):
                return False
            chunk, taken_over = self.next_chunk(step, sorted(work - self.done))
            if step in self.switch and set(chunk) == work - self.done:
                self.trouble = not (yield from self.switch_early(step))
                continue
            last = set(chunk) == work - self.done and not self.shadow[step] and not taken_over
            yield Compute(step, chunk, last, taken_over)
            self.done.update(chunk)
        return True

    def switch_early(self, step: int) -> Moves:
        """`early`: a pending view takes over before the last microbatch, behind which whatever a joiner does first is hidden."""
        pending = self.switch.pop(step)
        if self.fence < step - 1 and not (yield from self.pass_fence(step - 1)):
            return False
        return (yield from self.enter_pending(pending))

    def next_chunk(self, step: int, left: list[int]) -> tuple[tuple[int, ...], int]:
        """What to compute next, and how much of it was taken over from the dead: last, one by one, and nothing is launched
        before it is over, so that whoever dies of it has told of one microbatch, which is in no bucket."""
        own = [index for index in left if (step, index) not in self.extra]
        return (tuple(own[:self.chunk]), 0) if own else (tuple(left[:1]), 1)

    def turn(self) -> Generator[Any, Any, list[bool]]:
        """`turn`: positions of a replica act as one, and any one can stop all."""
        stop: list[bool] = yield Agree("turn", self.disturbed())
        return stop

    def complete(self, step: int, ok: bool) -> Moves:
        """`agreement`: commit when every position of the replica is whole; post the fence; `vector`: the leader's."""
        pending = self.pending if self.pending and self.pending.base == self.view.id else None
        willing = self.leave_after is None and (self.level or self.caught_up)
        agreed = yield from self.agree_complete((ok, Speed(self.speed if willing else 0.0, pending, self.digest)))
        if not all(fine for fine, _ in agreed):
            return False
        self.says = self.said(agreed)
        self.level = self.level or self.says.speed > 0
        self.step = step + 1
        self.reduced, self.done = set(), set()
        self.extra = {(s, i) for s, i in self.extra if s > step}
        for past in [s for s in self.owes if s <= step]:
            del self.owes[past], self.shadow[past]
        yield from self.post_fence(step)
        yield Commit(step, self.view.id, self.view.members)
        return True

    def agree_complete(self, says: tuple[bool, Speed]) -> Generator[Any, Any, list[tuple[bool, Speed]]]:
        agreed: list[tuple[bool, Speed]] = yield Agree("complete", says)
        return agreed

    def said(self, agreed: list[tuple[bool, Speed]]) -> Speed:
        return agreed[0][1]

    # -- fences -----------------------------------------------------------------------------------------------------
    def fenced_launch(self, leaving: bool) -> bool:
        """`fence`: no bucket of step t is launched before the fence of t-1; `exit`: nobody leaves before it either."""
        return True

    def post_fence(self, step: int) -> Moves:
        if self.posted >= step:
            return True
        self.posted = step
        says = self.says
        if says.pending and says.pending.base != self.view.id:
            says = Speed(says.speed, None, says.digest)
        yield PostFence(step, says)
        return True

    def pass_fence(self, step: int) -> Moves:
        yield from self.post_fence(step)
        result: dict[int, Speed] | None = yield AwaitFence(step)
        if result is None:
            return False
        if step >= 0:
            self.hear_fence(step, result)
        self.fence = step
        yield Fenced(step)
        return True

    def hear_fence(self, step: int, result: dict[int, Speed]) -> None:
        """`lag`: what the fence of t carries takes effect at t+2. Raises Diverged if the members' states differ (I5)."""
        digests = {m: said.digest for m, said in sorted(result.items()) if said.digest}
        if len(set(digests.values())) > 1:
            raise Diverged(f"replicas differ after an update before step {step + 1}: their hashes are {digests}")
        if any(said.speed for said in result.values()):
            self.vectors[self.takes_effect(step)] = {m: said.speed for m, said in sorted(result.items())}
            for past in sorted(s for s in self.vectors if s <= step)[:-1]:
                del self.vectors[past]
        pending = [said.pending for said in result.values()]
        if pending[0] is not None and all(p is not None and p.view.id == pending[0].view.id for p in pending):
            self.switch[self.takes_effect(step)] = pending[0]

    def takes_effect(self, step: int) -> int:
        return step + 2

    # -- recovery ---------------------------------------------------------------------------------------------------
    def recover(self) -> Moves:
        """Report, decide, confirm, forward. False: not there yet, recover again."""
        self.clean = False
        if (self.trouble or self.wants_out()) and NO_VIEW < self.view.id >= self.latest:
            yield Suspect(self.view.id)
        self.reduced |= yield Halt(self.step)
        parts: list[Status] = yield Agree("status", Status(self.step, frozenset(self.reduced), (self.layout, self.buckets),
                                                           self.formed, dict(self.vectors), self.leave_asked))
        self.leave_asked = self.leave_said = any(part.leaving for part in parts)
        answer: Answer | None = None
        if self.position == 0:
            answer = yield Exchange(self.view.id, self.report(parts))
        answer = (yield Agree("answer", answer))[0]
        assert answer is not None
        self.view, self.posted = answer.view, -2
        self.latest = max(self.latest, self.view.id)
        if answer.reports is None:
            self.step, self.level = None, False             # whoever is let in by the fence was not in the run
        self.trouble = not (yield Reform(self.view))
        if answer.reports is None:
            return (yield from self.let_in())
        decision = decide(self.view.members, answer.reports, self.job, self.view.killers)
        if decision is None:
            self.over = True
            return False
        self.apply(decision, answer.reports[self.me])
        if decision.low == self.job.steps:
            self.over = True
            return True
        yield from self.carry_out(decision)
        return True

    def report(self, parts: list[Status]) -> Report:
        """`one report per replica`: its positions' buckets, and what it owes for this step and the next."""
        assert len({part.step for part in parts}) == 1, "positions of one replica are at different steps"
        owes: dict[int, frozenset[int]] = {}
        shadow: dict[int, frozenset[int]] = {}
        formed = any(part.formed for part in parts)
        if self.step is not None and formed and self.vectors:
            for step in (self.step, self.step + 1):
                self.plan(step)
                owes[step], shadow[step] = self.handed_back(step), frozenset(self.shadow[step])
        reduced = frozenset((p, b) for p, part in enumerate(parts) for b in part.reduced)
        return Report(step=self.step, level=self.level, leaving=self.leave_asked, fresh=self.view.id == NO_VIEW, formed=formed,
                      owes=owes, shadow=shadow, buckets=tuple(part.buckets for part in parts), reduced=reduced,
                      vectors={s: v for part in parts for s, v in part.vectors.items()}, skipped=self.skipped)

    def handed_back(self, step: int) -> frozenset[int]:
        """`handback`: a leaver reports as its work only what it has done; the rest is lost, and shared out."""
        if not self.leave_asked:
            return frozenset(self.owes[step])
        return frozenset(self.owes[step] & self.done) if step == self.step else frozenset()

    def let_in(self) -> Moves:
        """A view announced with the fence lets this joiner in."""
        result = (yield Enter(None)) if not self.trouble else None
        if not all((yield Agree("entered", result is not None))):
            return False
        assert result is not None
        step, vectors, buckets = result
        self.enter(step, step, self.given(step, vectors), buckets)
        yield Entered(self.view.id, step)
        self.clean, self.trouble = True, False
        return True

    def given(self, step: int, vectors: dict[int, Vector]) -> dict[int, Vector]:
        """`vectors`: a joiner that the fence lets in is given the vectors in force."""
        return vectors

    def enter(self, low: int, high: int, vectors: dict[int, Vector], buckets: tuple[int, int]) -> None:
        self.layout, self.buckets = buckets
        self.step, self.fence, self.decided, self.vectors = low, low - 1, high, dict(vectors)
        self.owes, self.shadow = {low: set(), high: set()}, {low: set(), high: set()}

    def enter_pending(self, pending: Pending) -> Moves:
        """A member's side of it: the old view ends here, after the fence of the step before."""
        assert self.step is not None
        if pending.base != self.view.id:
            return True
        self.view, self.pending, self.posted = pending.view, None, self.step - 1
        self.trouble = not (yield Reform(self.view))
        return not self.trouble and (yield Enter((self.step, dict(self.vectors), (self.layout, self.buckets)))) is not None

    def apply(self, decision: Decision, report: Report) -> None:
        """Take over a decision: what is owed, the vectors in force, and which fences it stands for."""
        self.switch, self.pending, self.skipped = {}, None, decision.skipped
        self.leave_after, self.ending = decision.last(self.me), decision.ending
        self.pause_at = decision.high if decision.paused else None
        if not decision.formed:
            self.step, self.level, self.decided = 0, True, -1     # until formed, nobody knows the first step
            self.vectors, self.owes, self.shadow = {0: decision.vector}, {}, {}
            return
        if report.step is None or report.fresh:
            self.level = False
            self.enter(decision.low, decision.high, {}, decision.buckets[self.position])
            report = Report(None)
        high = decision.high
        if report.step is not None:
            self.owes = {s: set(w) for s, w in report.owes.items() if self.kept(s, high)}
            self.shadow = {s: set(w) for s, w in report.shadow.items() if self.kept(s, high)}
        self.vectors = {s: v for s, v in self.vectors.items() if s <= high} | {high + 1: decision.vector}
        self.decided = high
        self.fence = max(self.fence, self.proven(decision.low))
        extra = set(decision.extra.get(self.me, ()))
        self.owes[high] = self.owes.get(high, set()) | extra
        self.shadow.setdefault(high, set())
        self.extra |= {(high, i) for i in extra}
        if self.me in decision.promoted:
            self.owes[high], self.shadow[high] = self.owes[high] | self.shadow[high], set()

    def kept(self, step: int, high: int) -> bool:
        """`reset`: a decision drops everything planned or owed for steps after the newest."""
        return step <= high

    def proven(self, low: int) -> int:
        """`proves`: a decision stands for the fence of the step before the oldest."""
        return low - 1

    def carry_out(self, decision: Decision) -> Moves:
        """Confirm the decision, post again the fence that peers may have missed, forward what is whole."""
        assert self.step is not None
        mine = decision.extra.get(self.me, ())
        yield Decided(self.step, decision.lost, mine, sum(map(bool, decision.holders.values())), len(decision.redone()))
        yield Fenced(self.fence)
        if not self.trouble:
            self.trouble = not (yield from self.confirm())
        self.clean = not self.trouble
        if decision.formed and self.fence < self.step - 1 and not self.trouble:
            yield from self.post_fence(self.step - 1)
        if decision.formed and not self.trouble:
            yield from self.forward(decision)
        return True

    def confirm(self) -> Moves:
        """`confirm`: a decision is acted upon only after one fence in the new view: then all members have it."""
        confirmed: bool = yield Confirm()
        return confirmed

    def forward(self, decision: Decision) -> Moves:
        """`forward`: a bucket of the oldest step that some survivor holds is given to those who lack it."""
        low = decision.low
        held = {b: h for (p, b), h in decision.holders.items() if p == self.position and h}
        gives = {b: tuple(m for m in self.view.members if m not in h) for b, h in held.items() if h[0] == self.me}
        gives = {b: to for b, to in gives.items() if to}
        takes = {b: h[0] for b, h in held.items() if self.me not in h}
        if not gives and not takes:
            return True
        outcome: Outcome = yield Forward(low, gives, takes)
        if takes:
            self.reduced |= outcome.reduced
        self.trouble = self.trouble or not outcome.ok
        return outcome.ok
