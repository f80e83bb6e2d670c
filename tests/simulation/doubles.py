"""Test doubles that leave one rule of DESIGN 3.2 out each: the simulation must find a violation with any of them.

`PARTS` maps the rule's name to the parts of a simulation without it. The product has no switches: every rule is a
method or a function, and a double overrides it.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from worlds import Floored, Measured, Preempted, Stopping

from recover.protocol import decision
from recover.protocol.coordinator import Coordinator
from recover.protocol.position import Position
from recover.protocol.requests import Fenced
from recover.simulate.actor import Actor
from recover.simulate.protocol import Parts
from recover.simulate.world import World


class NoFence(Position):
    def pass_fence(self, step):
        yield from self.post_fence(step)
        self.fence = step
        yield Fenced(step)
        return True


class NoLag(Position):
    def takes_effect(self, step):
        return step + 1


class NoReset(Position):
    def kept(self, step, high):
        return True


class NoForward(Position):
    def forward(self, decision):
        return True
        yield


class NoOrder(Actor):
    def launches_all_first(self):
        return False


class NoConfirm(Position):
    def confirm(self):
        return True
        yield


class NoProves(Position):
    def proven(self, low):
        return self.fence


class NoAgreement(Position):
    def agree_complete(self, says):
        return [says]
        yield


class NoTurn(Position):
    def turn(self):
        return [self.disturbed()]
        yield


class NoVector(Position):
    def said(self, agreed):
        return agreed[self.position][1] if len(agreed) > self.position else agreed[0][1]


class NoFreeze(Actor):
    def drops_late(self):
        return False


class NoSettle(Actor):
    def contribution(self, counted):
        return self.local if counted else frozenset()


class NoExit(Position):
    def fenced_launch(self, leaving):
        return not leaving


class NoHandback(Position):
    def handed_back(self, step):
        return frozenset(self.owes[step])

    def apply(self, decided, report):
        super().apply(decided, report)
        if self.me in decided.leaving and self.step is not None and decided.high in self.owes:
            self.owes[decided.high] &= self.done


class NoSuspect(Coordinator):
    def suspect(self, view):
        pass


class NoBlame(Coordinator):
    def blame(self, member):
        pass


class NotAtOnce(Actor):
    def tells_at_once(self):
        return False


class NoIncarnation(World):
    """The supervisor forgets to raise it."""

    def restart(self):
        super().restart()
        self.incarnation = 0
        self.coordinator.incarnation = 0


class NoIncarnationCounter(Coordinator):
    def first_number(self, newest):
        return newest.id[1]


class NotNewest(Coordinator):
    def rebuild(self):
        newest = self.newest()
        if self.heard and newest is not None:               # the endpoints of whoever is taken in must be known
            for announcement in self.heard.values():
                newest.endpoints.update(announcement.view.endpoints)
        super().rebuild()

    def eligible(self, newest, heard):
        return list(heard)


class NoHold(Coordinator):
    def joined(self, member, endpoints):
        if self.heard is not None and not self.may_form_without():
            self.heard = None
            self.issue({member: endpoints})
        else:
            super().joined(member, endpoints)

    def may_form_without(self):
        return self.incarnation == 0


class NoReissue(Coordinator):
    def may_go_on(self, newest, heard):
        return all(m in heard and heard[m].view.id == newest.id for m in newest.members)


class NoVectors(Position):
    def given(self, step, vectors):
        return {step: {self.me: 1.0}}


class NoFloor(Position):
    def paused(self):
        return False


class NotUnbegun(Position):
    def ends_unformed(self):
        return False


class NoFirst(Position):
    def counted_from(self, start, step):
        return step


class Joins(World):
    """Many joins with the fence and broken connections, three positions, nothing else."""

    def __init__(self, seed, positions=None, *rest):
        super().__init__(seed, 3, *rest)
        self.job = replace(self.job, steps=6)
        self.poison = set()
        self.budget = dict(self.budget, join=2, flap=8, kill=0, crash=0, freeze=0, leave=0)


class Crashes(World):
    """Crashes of the coordinator, and members that sleep through one."""

    def __init__(self, seed, positions=None, *rest):
        super().__init__(seed, 1, *rest)
        self.job = replace(self.job, steps=6)
        self.poison = set()
        self.budget = dict(self.budget, crash=3, freeze=2, leave=0, join=1)


PLAIN = Parts()
WORLDS = dict(atonce=Joins, newest=Crashes, lag=Measured, floor=Floored, unbegun=Stopping, confirm=Preempted)
"""Where the plain world shows the need of a rule only once in ten thousand seeds or more."""
PARTS = dict(
    fence=replace(PLAIN, position=NoFence), lag=replace(PLAIN, position=NoLag, world=Measured),
    reset=replace(PLAIN, position=NoReset),
    forward=replace(PLAIN, position=NoForward), order=replace(PLAIN, actor=NoOrder),
    confirm=replace(PLAIN, position=NoConfirm, world=Preempted),
    proves=replace(PLAIN, position=NoProves), agreement=replace(PLAIN, position=NoAgreement),
    turn=replace(PLAIN, position=NoTurn), vector=replace(PLAIN, position=NoVector), freeze=replace(PLAIN, actor=NoFreeze),
    settle=replace(PLAIN, actor=NoSettle), exit=replace(PLAIN, position=NoExit), handback=replace(PLAIN, position=NoHandback),
    whole=PLAIN, clean=PLAIN, unknown=PLAIN, late=PLAIN,
    suspect=replace(PLAIN, coordinator=NoSuspect), blame=replace(PLAIN, coordinator=NoBlame),
    atonce=replace(PLAIN, actor=NotAtOnce, world=Joins),
    verdict=replace(PLAIN, verdict=False), incarnation=replace(PLAIN, coordinator=NoIncarnationCounter, world=NoIncarnation),
    newest=replace(PLAIN, coordinator=NotNewest, world=Crashes), hold=replace(PLAIN, coordinator=NoHold),
    reissue=replace(PLAIN, coordinator=NoReissue), vectors=replace(PLAIN, position=NoVectors),
    floor=replace(PLAIN, position=NoFloor, world=Floored),
    unbegun=replace(PLAIN, position=NotUnbegun, world=Stopping), first=replace(PLAIN, position=NoFirst))


@contextmanager
def without(rule: str) -> Iterator[Parts]:
    """The parts without `rule`; some rules live in functions of `decision`, which are replaced meanwhile."""
    kept = decision.promotable, decision.countable, decision.at_hand, decision.holds_parameters
    if rule == "whole":
        decision.promotable = lambda shadow, lost: bool(shadow & lost)
    elif rule == "clean":
        decision.countable = lambda shadow: True
    elif rule == "unknown":
        decision.at_hand = lambda old, formed: [report.step for report in old.values()]
    elif rule == "late":
        decision.holds_parameters = lambda report, formed: report.level or not formed
    try:
        yield PARTS[rule]
    finally:
        decision.promotable, decision.countable, decision.at_hand, decision.holds_parameters = kept
