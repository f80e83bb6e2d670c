"""`Roles`, the paper's policy: majors, one minor, and spares that compute what another owes.

With W members and B microbatches, every step is planned as::

    G = ceil(B / W)     majors = B // G     R = B - majors * G

`majors` members owe G microbatches each; if R > 0, one *minor* owes R; the others are *spares*, one of them the
minor's if there is a minor and at least two are left. A spare computes its counterpart's microbatches beside it; they
do not count until it is promoted. The n-th major-spare stands behind the n-th major.

When members die within a step:

1. A spare is promoted if its whole shadow is lost. (The paper lets any major-spare stand in for any major, as its
   microbatches are interchangeable samples. Ours are named: counting other microbatches than the lost ones would sum
   some twice and some never.)
2. If some are still lost, the step meets a *policy boundary*: C_cur microbatches count, n members are able to go on,
   and G_ext >= 1 is the smallest with `C_cur + n * G_ext >= B`. Each of the n owes G_ext more, except that
   `C_cur + n * G_ext - B` of them, the *boundary minors*, owe only G_ext - 1 more. Able are the members that count: a
   spare that isn't promoted holds others' microbatches in its sums, and un-zeroing it could exceed B (28 majors, a
   minor and a major-spare; the minor dies: 28 * 9 + 9 = 261 of 256).
3. The steps after that one are planned anew over the survivors.

So the total is B at every step. `Roles` is the policy; `assign` and `extend` are the two formulas; `RolesRun` models
the life of a run, for tests and for planning.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from recover.workload.policy import Plan, deal, members


class Role(StrEnum):
    MAJOR = "major"
    MINOR = "minor"
    MAJOR_SPARE = "major-spare"
    MINOR_SPARE = "minor-spare"


class Assignment(NamedTuple):
    """Roles of one step. `quotas`: what each owes (spares: 0); `behind`: spare -> the member whose work it repeats."""

    roles: dict[int, Role]
    quotas: dict[int, int]
    behind: dict[int, int]


class Extension(NamedTuple):
    """A policy boundary: members that count owe `more` microbatches, `boundary_minors` of them one less."""

    more: int
    boundary_minors: int


def assign(able: Sequence[int], total: int) -> Assignment:
    """Who is what, from the members' order and B alone. `able`: at least one member; `total`: at least one."""
    quota = -(-total // len(able))
    majors, rest = divmod(total, quota)
    roles = dict.fromkeys(able[:majors], Role.MAJOR)
    quotas = dict.fromkeys(able[:majors], quota)
    behind: dict[int, int] = {}
    spares = list(able[majors:])
    if rest:
        minor = spares.pop(0)
        roles[minor], quotas[minor] = Role.MINOR, rest
        if len(spares) >= 2:
            behind[spares.pop()] = minor
    behind.update({spare: able[n % majors] for n, spare in enumerate(spares)})
    for spare, counterpart in sorted(behind.items()):
        roles[spare] = Role.MINOR_SPARE if roles[counterpart] == Role.MINOR else Role.MAJOR_SPARE
        quotas[spare] = 0
    return Assignment(roles, quotas, behind)


def extend(current: int, able: int, total: int) -> Extension:
    """The boundary's formula: `current` microbatches still count (C_cur < B), `able` members count and go on."""
    if not 0 <= current < total or able < 1:
        raise ValueError(f"no boundary: {current} of {total} microbatches count, {able} members are able")
    more = -(-(total - current) // able)
    return Extension(more, current + able * more - total)


@dataclass(frozen=True)
class Roles:
    """The paper's policy for a run that starts with `initial` replicas of `per_replica` microbatches each."""

    initial: int
    per_replica: int
    name: str = "roles"
    constant: bool = True

    def __post_init__(self) -> None:
        if self.initial < 1 or self.per_replica < 1:
            raise ValueError(f"initial and per_replica must be at least 1, not {self.initial} and {self.per_replica}")

    def plan(self, vector: Mapping[int, float], step: int, total: int) -> Plan:
        """As for every policy; ValueError also if `total` is not `initial * per_replica`."""
        if total != self.initial * self.per_replica:
            raise ValueError(f"Roles({self.initial}, {self.per_replica}) is for {self.initial * self.per_replica} "
                             f"microbatches in a step, not {total}")
        roles = assign(members(vector), total)
        work = deal(range(total), roles.quotas)
        return Plan(work, {spare: work[counterpart] for spare, counterpart in roles.behind.items()})

    def share(self, lost: Sequence[int], able: Sequence[int], vector: Mapping[int, float],
              done: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """G_ext for everyone able, G_ext - 1 for the boundary minors: those who owe most, then the highest numbers."""
        if not lost:
            return {}
        if not able:
            raise ValueError(f"{len(lost)} microbatches are lost and nobody is able to take them")
        more, minors = extend(0, len(able), len(lost))
        order = sorted(able, key=lambda m: (done.get(m, 0), m))
        return deal(lost, {m: more - (n >= len(able) - minors) for n, m in enumerate(order)})


@dataclass(frozen=True)
class RolesRun:
    """The life of a run under `Roles`, as values: `lose` members within a step, `commit` it, and so on.

    `work` and `shadow` are those of the step at hand, extended by what was reassigned; `boundary` is the last
    extension of the step, None while spares absorbed every loss. `counted()` is B after every event.
    """

    policy: Roles
    members: tuple[int, ...]
    step: int = 0
    work: dict[int, tuple[int, ...]] = field(default_factory=dict)
    shadow: dict[int, tuple[int, ...]] = field(default_factory=dict)
    promoted: tuple[int, ...] = ()
    boundary: Extension | None = None

    @classmethod
    def begin(cls, initial: int, per_replica: int) -> RolesRun:
        return cls(Roles(initial, per_replica), tuple(range(initial)))._planned()

    @property
    def total(self) -> int:
        return self.policy.initial * self.policy.per_replica

    def counted(self) -> int:
        """How many microbatches the step at hand will sum."""
        return sum(map(len, self.work.values()))

    def roles(self) -> dict[int, Role]:
        """Of the plan that the step started with, over the present members."""
        return assign(self.members, self.total).roles

    def lose(self, dead: Collection[int]) -> RolesRun:
        """These members die in the middle of the step: spares are promoted, the rest is a boundary."""
        survivors = tuple(m for m in self.members if m not in dead)
        if not survivors:
            raise ValueError(f"nobody is left after members {sorted(dead)} of {list(self.members)}")
        work = {m: w for m, w in self.work.items() if m not in dead}
        shadow = {m: w for m, w in self.shadow.items() if m not in dead}
        lost = set(range(self.total)) - {i for w in work.values() for i in w}
        promoted = []
        for spare, theirs in sorted(shadow.items()):
            if lost.issuperset(theirs):
                lost -= set(theirs)
                promoted.append(spare)
                work[spare] = theirs
        shadow = {m: w for m, w in shadow.items() if m not in promoted}
        after = replace(self, members=survivors, work=work, shadow=shadow, promoted=(*self.promoted, *promoted))
        return after._extended(lost) if lost else after

    def _extended(self, lost: set[int]) -> RolesRun:
        able = [m for m in self.members if m not in self.shadow]
        done = {m: len(w) for m, w in self.work.items()}
        extra = self.policy.share(sorted(lost), able, dict.fromkeys(able, 1.0), done)
        work = {m: tuple(sorted((*self.work.get(m, ()), *extra.get(m, ())))) for m in able}
        return replace(self, work=work, boundary=extend(self.total - len(lost), len(able), self.total))

    def commit(self) -> RolesRun:
        """The step is done; the next one starts with the plan over its survivors."""
        assert self.counted() == self.total, f"step {self.step} sums {self.counted()} of {self.total} microbatches"
        return replace(self, step=self.step + 1, promoted=(), boundary=None)._planned()

    def _planned(self) -> RolesRun:
        work, shadow = self.policy.plan(dict.fromkeys(self.members, 1.0), self.step, self.total)
        return replace(self, work=work, shadow=shadow)


def advance(run: RolesRun, dead: Collection[int] = ()) -> tuple[RolesRun, RolesRun]:
    """One step: (the step as it was committed after `dead` died in it, the beginning of the next one)."""
    committed = run.lose(dead) if dead else run
    return committed, committed.commit()
