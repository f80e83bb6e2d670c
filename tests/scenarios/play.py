"""Plays a scenario: a small text file with a schedule of failures, and below a line `---` what must come of it.

    replicas 4              (all replicas have one position)
    microbatches 8
    buckets 3               (optional: 2)
    steps 3                 (optional: 2)
    policy balanced         (optional; any name of recover.workload)
    kill 2 at compute:1 of step 1
    kill 0 at reduce:1 of step 2, seen by 1
    ---
    view 2 = 0 1 3
    ...

Places: `compute:i` (before its i-th microbatch of the step), `reduce:k` (k buckets are reduced, of the last of which only
those "seen by" hear; without that, all), `complete` (all buckets whole here, nobody told), `fence`, `optimizer` (after the
commit), and in a recovery `exchange`, `confirm`, `forward`. The world is as tame as can be: everyone advances in turn,
collectives succeed when all members contributed and fail for all when one can't any more, and the coordinator notices
a death only when nobody can go on. Everything is decided by the real `recover.protocol`.

`python tests/scenarios/play.py FILE` prints what comes of it.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from recover.protocol import position as module
from recover.protocol import requests as ask
from recover.protocol.coordinator import Answered, Coordinator
from recover.protocol.decision import Decision, Job, decide
from recover.protocol.messages import Endpoint
from recover.protocol.position import Position
from recover.workload import policy

KILL = re.compile(r"kill (\d+) at (\w+)(?::(\d+))? of step (\d+)(?:, seen by ([\d ]+))?$")


@dataclass
class Kill:
    replica: int
    place: str
    index: int
    step: int
    seen_by: tuple[int, ...] | None
    happened: bool = False


@dataclass
class Scenario:
    replicas: int = 0
    microbatches: int = 0
    buckets: int = 2
    steps: int = 2
    policy: str = "balanced"
    kills: list[Kill] = field(default_factory=list)


def parse(text: str) -> Scenario:
    """ValueError names the line that is not understood."""
    scenario = Scenario()
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        word, _, rest = line.partition(" ")
        if not line:
            continue
        if found := KILL.match(line):
            replica, place, index, step, seen = found.groups()
            seen_by = tuple(map(int, seen.split())) if seen else None
            scenario.kills.append(Kill(int(replica), place, int(index or 0), int(step), seen_by))
        elif word in ("replicas", "microbatches", "buckets", "steps"):
            setattr(scenario, word, int(rest))
        elif word == "policy":
            scenario.policy = rest
        else:
            raise ValueError(f"not understood: {line!r}")
    return scenario


class Dies(Exception):
    pass


class Blocked(Exception):
    """Nobody can go on, and no death explains it."""


class Stage:
    """The world of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.ops: dict[tuple[Any, ...], dict[int, Any]] = {}
        self.blind: dict[tuple[Any, ...], tuple[int, ...]] = {}     # op -> the only ones who hear of its success
        self.dead: list[int] = []
        self.noticed: set[int] = set()
        self.coordinator = Coordinator(scenario.replicas)
        self.answers: dict[Any, Any] = {}
        self.decisions: dict[int, tuple[tuple[int, ...], Decision]] = {}
        self.committed: dict[tuple[int, int], dict[int, Any]] = {}
        self.moved = False
        for m in range(scenario.replicas):
            self.coordinator.joined(m, (Endpoint("host", m),))
        self.deliver()

    def deliver(self) -> None:
        for output in self.coordinator.outbox:
            if isinstance(output, Answered):
                self.answers[output.view] = output.payloads
        self.coordinator.outbox.clear()

    def play(self) -> str:
        actors = {m: Actor(self, m) for m in range(self.scenario.replicas)}
        running = {m: actor.run() for m, actor in actors.items()}
        with patch.object(module, "decide", self.record):
            while running:
                self.moved = False
                for m in list(running):
                    if next(running[m], "over") == "over":
                        del running[m]
                        self.moved = True
                if not self.moved and not self.notice():
                    raise Blocked({m: actors[m].doing for m in running})
        missed = [kill for kill in self.scenario.kills if not kill.happened]
        assert not missed, f"did not happen: {missed}"
        return "\n".join([*self.told(), *self.ledger()]) + "\n"

    def notice(self) -> bool:
        late = [m for m in self.dead if m not in self.noticed]
        if late:
            self.noticed.add(late[0])
            self.coordinator.lost(late[0])
            self.deliver()
        return bool(late)

    def record(self, members: Any, reports: Any, job: Job, killers: Any = ()) -> Decision | None:
        decision = decide(members, reports, job, killers)
        if decision is not None:
            self.decisions[self.coordinator.view.id[1]] = tuple(members), decision
        return decision

    def told(self) -> Iterator[str]:
        for number, (members, decision) in sorted(self.decisions.items())[1:]:
            yield f"view {number} = {' '.join(map(str, members))}"
            steps = f"step {decision.low}" if decision.low == decision.high else f"steps {decision.low} and {decision.high}"
            yield f"  {steps}, lost {numbers(decision.lost)}"
            for m, extra in sorted(decision.extra.items()):
                yield f"  {m} takes over {numbers(extra)}"
            for m in sorted(decision.promoted):
                yield f"  {m} is promoted"
            for (_, b), holders in decision.holders.items():
                lacking = [m for m in members if m not in holders]
                if holders and lacking:
                    yield f"  bucket {b}: {holders[0]} forwards to {numbers(lacking)}"
                elif not holders:
                    yield f"  bucket {b}: redone"

    def ledger(self) -> Iterator[str]:
        yield "ledger"
        for step in range(self.scenario.steps):
            contents: dict[str, list[int]] = {}
            for (s, b), values in sorted(self.committed.items()):
                if s != step:
                    continue
                alive = {m: v for m, v in values.items() if m not in self.dead} or values
                assert len(set(alive.values())) == 1, f"I2: survivors differ in step {s}, bucket {b}: {alive}"
                parts = next(iter(alive.values()))
                counted = sorted(i for _, part in parts for i in part)
                assert counted == list(range(self.scenario.microbatches)) or self.scenario.policy == "shrinking", counted
                contents.setdefault(" ".join(f"{m}={numbers(part)}" for m, part in parts if part), []).append(b)
            for content, buckets in contents.items():
                yield f"  step {step}, bucket {numbers(buckets)}: {content}"


def numbers(values: Any) -> str:
    return ",".join(map(str, sorted(values))) or "nothing"


class Actor:
    """One replica of one position."""

    def __init__(self, stage: Stage, me: int) -> None:
        scenario = stage.scenario
        self.stage, self.me = stage, me
        chosen = policy(scenario.policy, replicas=scenario.replicas, microbatches=scenario.microbatches)
        job = Job(scenario.microbatches, scenario.steps, chosen)
        self.position = Position(job, me, 0, scenario.buckets, first=True)
        self.local: set[int] = set()
        self.sums: dict[int, Any] = {}
        self.held: dict[int, Any] = {}
        self.doing: Any = None

    def run(self) -> Iterator[None]:
        moves, answer = self.position.run(), None
        while True:
            try:
                self.doing = request = moves.send(answer)
                answer = yield from getattr(self, type(request).__name__.lower())(request)
                self.stage.moved = True
            except StopIteration:
                return
            except Dies:
                self.stage.dead.append(self.me)
                return

    def place(self, name: str, step: int | None, index: int = 0) -> None:
        for kill in self.stage.scenario.kills:
            if (kill.replica, kill.place, kill.index, kill.step) == (self.me, name, index, step) and not kill.happened:
                kill.happened = True
                raise Dies

    def key(self, *name: Any) -> tuple[Any, ...]:
        return (self.position.view.id, *name)

    def give(self, key: tuple[Any, ...], value: Any) -> None:
        self.stage.ops.setdefault(key, {})[self.me] = value

    def wait(self, key: tuple[Any, ...]) -> Any:
        members = self.position.view.members
        while True:
            given = self.stage.ops.get(key, {})
            hears = self.me in self.stage.blind.get(key, members)
            if given.keys() == set(members) and hears:
                return dict(given)
            if any(m in self.stage.dead and (m not in given or not hears) for m in members):
                return None
            if self.stage.coordinator.view.id > self.position.view.id:
                return None
            yield

    def agree(self, request: ask.Agree) -> Any:
        if request.kind == "complete" and request.value[0]:
            self.place("complete", self.position.step)
        return [request.value]
        yield

    def begin(self, request: ask.Begin) -> Any:
        self.local = set()
        return None
        yield

    def relayout(self, request: ask.Relayout) -> Any:
        return self.stage.scenario.buckets
        yield

    def compute(self, request: ask.Compute) -> Any:
        self.place("compute", request.step, len(self.local))
        self.local.update(request.indices)
        yield

    def form(self, request: ask.Form) -> Any:
        self.give(self.key("form"), None)
        whole = (yield from self.wait(self.key("form"))) is not None
        return ask.Formed(0, self.stage.scenario.buckets) if whole else None

    def postfence(self, request: ask.PostFence) -> Any:
        self.place("fence", request.step)
        self.give(self.key("fence", request.step), request.says)
        return None
        yield

    def awaitfence(self, request: ask.AwaitFence) -> Any:
        return (yield from self.wait(self.key("fence", request.step)))

    def reduce(self, request: ask.Reduce) -> Any:
        share = tuple(sorted(self.local if request.counted else ()))
        fatal = [kill for kill in self.stage.scenario.kills if (kill.replica, kill.place, kill.step) == (
            self.me, "reduce", request.step) and not kill.happened]
        for n, b in enumerate(request.buckets):
            if fatal and n == fatal[0].index:
                break
            key = self.key("sum", request.step, b)
            self.give(key, share)
            if fatal and n == fatal[0].index - 1 and fatal[0].seen_by is not None:
                self.stage.blind[key] = (*fatal[0].seen_by, self.me)
        for b in request.buckets:
            if fatal and b == request.buckets[min(fatal[0].index, len(request.buckets) - 1)]:
                break
            result = yield from self.wait(self.key("sum", request.step, b))
            if result is None:
                return ask.Outcome(frozenset(self.sums), False)
            self.sums[b] = tuple(sorted(result.items()))
        if fatal:
            self.place("reduce", request.step, fatal[0].index)
        return ask.Outcome(frozenset(self.sums), True)

    def commit(self, request: ask.Commit) -> Any:
        for b, value in self.sums.items():
            self.stage.committed.setdefault((request.step, b), {})[self.me] = value
        self.held, self.sums = self.sums, {}
        self.place("optimizer", request.step)
        return None
        yield

    def fenced(self, request: ask.Fenced) -> Any:
        return None
        yield

    decided = suspect = fenced

    def halt(self, request: ask.Halt) -> Any:
        return frozenset(self.sums)
        yield

    def exchange(self, request: ask.Exchange) -> Any:
        if self.position.view.members:
            self.place("exchange", request.report.step)
        stage, sent = self.stage, None
        while True:
            view = stage.coordinator.view
            if view.id > request.view and sent != view.id:
                stage.coordinator.report(self.me, view.id, request.report)      # type: ignore[arg-type]
                stage.deliver()
                sent = view.id
                stage.moved = True
            if sent in stage.answers:
                self.position.news(view)
                return ask.Answer(view, stage.answers[sent])
            yield

    def reform(self, request: ask.Reform) -> Any:
        return True
        yield

    def confirm(self, request: ask.Confirm) -> Any:
        self.place("confirm", self.position.step)
        self.give(self.key("confirm"), None)
        return (yield from self.wait(self.key("confirm"))) is not None

    def forward(self, request: ask.Forward) -> Any:
        self.place("forward", request.step)
        for b in request.gives:
            self.give(self.key("forward", request.step, b), self.held[b] if self.position.step != request.step else self.sums[b])
        for b, source in request.takes.items():
            key = self.key("forward", request.step, b)
            while source not in self.stage.ops.get(key, {}):
                if source in self.stage.dead:
                    return ask.Outcome(frozenset(self.sums), False)
                yield
            self.sums[b] = self.stage.ops[key][source]
        return ask.Outcome(frozenset(self.sums), True)


def play(text: str) -> str:
    """What comes of the schedule in the part above `---`."""
    return Stage(parse(text.split("---\n")[0])).play()


if __name__ == "__main__":
    print(play(Path(sys.argv[1]).read_text()), end="")
