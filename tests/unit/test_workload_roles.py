"""The paper's roles: its numbers, and the total through every failure down to one survivor."""
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.workload import Plan, Roles, RolesRun, advance, check_plan
from recover.workload.roles import Extension, Role, assign, extend

PER_REPLICA = [1, 2, 3, 4, 7, 8]


def census(run):
    return Counter(run.roles().values())


def exact(run):
    return Counter(i for w in run.work.values() for i in w) == Counter(range(run.total))


def first(run, role):
    return next(m for m, r in sorted(run.roles().items()) if r == role)


def behind(run):
    """spare -> the member whose work it repeats"""
    return assign(run.members, run.total).behind


# -- the paper's numbers: 32 replicas of 8 microbatches ----------------------------------------------------------------
def test_all_are_majors_at_first():
    run = RolesRun.begin(32, 8)
    assert census(run) == {Role.MAJOR: 32}
    assert {len(w) for w in run.work.values()} == {8}
    assert exact(run)


def test_first_loss_is_a_boundary_of_23_minors():
    assert extend(248, 31, 256) == Extension(more=1, boundary_minors=23)
    run, after = advance(RolesRun.begin(32, 8), {5})
    assert run.boundary == Extension(1, 23)
    assert Counter(len(w) for w in run.work.values()) == {9: 8, 8: 23}
    assert exact(run)
    assert census(after) == {Role.MAJOR: 28, Role.MINOR: 1, Role.MAJOR_SPARE: 1, Role.MINOR_SPARE: 1}
    assert Counter(len(w) for w in after.work.values()) == {9: 28, 4: 1}
    assert exact(after)
    assert sorted(len(w) for w in after.shadow.values()) == [4, 9]


def test_losing_the_minor_promotes_its_spare_without_a_boundary():
    _, run = advance(RolesRun.begin(32, 8), {5})
    minor, spare = first(run, Role.MINOR), first(run, Role.MINOR_SPARE)
    run, after = advance(run, {minor})
    assert run.promoted == (spare,)
    assert run.boundary is None
    assert len(run.work[spare]) == 4
    assert exact(run)
    assert census(after) == {Role.MAJOR: 28, Role.MINOR: 1, Role.MAJOR_SPARE: 1}


def test_losing_the_major_before_a_spare_promotes_that_spare():
    _, run = advance(RolesRun.begin(32, 8), {5})
    spare = first(run, Role.MAJOR_SPARE)
    run, _ = advance(run, {behind(run)[spare]})
    assert run.promoted == (spare,)
    assert run.boundary is None
    assert exact(run)


def test_the_trap_un_zeroing_a_major_spare_for_a_minor_exceeds_the_total():
    run = RolesRun.begin(32, 8)
    for _ in range(2):                                  # two losses: 28 majors, one minor, one major-spare
        _, run = advance(run, {run.members[0]})
    assert census(run) == {Role.MAJOR: 28, Role.MINOR: 1, Role.MAJOR_SPARE: 1}
    spare, minor = first(run, Role.MAJOR_SPARE), first(run, Role.MINOR)
    after = run.lose({minor})
    assert sum(map(len, after.work.values())) == 256    # un-zeroing it would make 28 * 9 + 9 = 261
    assert after.promoted == ()
    assert spare not in after.work
    assert after.boundary == Extension(1, 24)
    assert Counter(len(w) for w in after.work.values()) == {10: 4, 9: 24}


def test_a_spare_is_not_promoted_when_only_part_of_its_shadow_is_lost():
    _, run = advance(RolesRun.begin(4, 3), {0})         # G=4: majors 1, 2, 3 and no spare
    assert census(run) == {Role.MAJOR: 3}
    _, run = advance(RolesRun.begin(8, 1), {0})         # G=2: 4 majors, three major-spares
    assert census(run) == {Role.MAJOR: 4, Role.MAJOR_SPARE: 3}
    unwatched = next(m for m in run.work if m not in behind(run).values())
    after = run.lose({unwatched})
    assert after.promoted == ()
    assert after.boundary is not None
    assert exact(after)
    mixed = replace(RolesRun.begin(2, 2), members=(0, 1, 2), shadow={2: (1, 2)})
    after = mixed.lose({0})                             # loses 0 and 1
    assert after.promoted == ()
    assert exact(after)


def test_losing_spares_costs_nothing():
    _, run = advance(RolesRun.begin(32, 8), {5})
    after = run.lose({first(run, Role.MAJOR_SPARE), first(run, Role.MINOR_SPARE)})
    assert after.work == run.work
    assert after.boundary is None


def test_a_second_loss_in_the_step_spares_those_who_owe_most():
    run = RolesRun.begin(4, 2).lose({3})                # 2 lost: members 0 and 1 owe 3, member 2 owes 2
    assert {m: len(w) for m, w in run.work.items()} == {0: 3, 1: 3, 2: 2}
    run = run.lose({0})                                 # 3 lost over 1 and 2: the boundary minor is 1
    assert {m: len(w) for m, w in run.work.items()} == {1: 4, 2: 4}
    assert exact(run)


# -- every failure, down to one survivor -------------------------------------------------------------------------------
def kinds(run):
    """One member of each kind whose death is told apart: the role, and whether a spare stands behind it."""
    watched = set(behind(run).values())
    return {(role, m in watched): m for m, role in run.roles().items()}.values()


@pytest.mark.parametrize("per_replica", PER_REPLICA)
def test_every_death_at_every_size_keeps_the_total(per_replica):
    """What follows a step depends on the number of survivors alone, so one death of each kind at each size, and each
    pair of kinds within one step, covers every order in which roles can die one by one."""
    for initial in range(1, 33):
        run = RolesRun.begin(initial, per_replica)
        while True:
            assert exact(run)
            check_plan(run.policy, Plan(run.work, run.shadow), dict.fromkeys(run.members, 1.0), run.total)
            if len(run.members) == 1:
                break
            afters = set()
            for dead in kinds(run):
                once, after = advance(run, {dead})
                assert exact(once)
                afters.add(tuple(sorted(len(w) for w in after.work.values())))
                for other in kinds(run) if initial <= 12 and len(once.members) > 1 else ():
                    assert other == dead or exact(once.lose({other}))
            assert len(afters) == 1                     # as the docstring says
            _, run = advance(run, {run.members[0]})


@st.composite
def lives(draw):
    initial = draw(st.integers(1, 12))
    order = draw(st.permutations(range(initial)))
    breaks = draw(st.lists(st.booleans(), min_size=initial, max_size=initial))
    return initial, draw(st.sampled_from(PER_REPLICA)), order[:-1], breaks


@given(lives())
@settings(max_examples=150)
def test_any_deaths_in_any_steps_keep_the_total(life):
    initial, per_replica, order, breaks = life
    run = RolesRun.begin(initial, per_replica)
    for dead, same_step in zip(order, breaks, strict=False):
        before = run
        run = run.lose({dead})
        assert exact(run)
        for m in run.work.keys() & before.work.keys():  # nobody is relieved of what it may have done already
            assert set(before.work[m]) <= set(run.work[m])
        if not same_step:
            run = run.commit()
            assert exact(run)
    assert len(run.members) == 1


def test_commit_refuses_a_step_that_is_not_whole():
    run = RolesRun.begin(3, 2)
    run.work.pop(1)
    with pytest.raises(AssertionError, match="sums 4 of 6"):
        run.commit()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="not 0 and 3"):
        Roles(0, 3)
    with pytest.raises(ValueError, match="is for 6 microbatches in a step, not 7"):
        Roles(2, 3).plan({0: 1.0, 1: 1.0}, 0, 7)
    with pytest.raises(ValueError, match="nobody is left"):
        RolesRun.begin(2, 1).lose({0, 1})
    with pytest.raises(ValueError, match="no boundary"):
        extend(4, 2, 4)


def test_more_members_than_at_first():
    """Joiners beyond the initial number: fewer each, still B; beyond B, spares."""
    plan = Roles(2, 2).plan(dict.fromkeys(range(6), 1.0), 0, 4)
    assert sorted(i for w in plan.work.values() for i in w) == [0, 1, 2, 3]
    assert plan.shadow == {4: (0,), 5: (1,)}
