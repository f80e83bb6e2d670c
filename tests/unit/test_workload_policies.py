"""Every policy: exactly once, the same for everyone, and level; the checks that say so can fail."""
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover.workload import (
    Balanced,
    Plan,
    Policy,
    Roles,
    Shrinking,
    Spares,
    SpeedWeighted,
    check_plan,
    check_share,
    policy,
    register,
)
from recover.workload.policy import deal, level
from recover.workload.speed import apportion

SPEEDS = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 1e6))
VECTORS = st.dictionaries(st.integers(0, 60), SPEEDS, min_size=1, max_size=12).filter(lambda v: any(v.values()))
TOTALS = st.integers(1, 80)


def policies(total):
    return [Balanced(), SpeedWeighted(), Roles(total, 1), Shrinking(max(1, total // 3)), Spares(Balanced(), 2, 5),
            Spares(SpeedWeighted(), 1, 3)]


def counted(parts):
    return Counter(i for indices in parts.values() for i in indices)


@given(VECTORS, TOTALS, st.integers(0, 9))
def test_plans_cover_the_step_exactly_once(vector, total, step):
    for p in policies(total):
        plan = p.plan(vector, step, total)
        check_plan(p, plan, vector, total)
        if p.constant:
            assert counted(plan.work) == Counter(range(total))
        else:
            assert counted(plan.work) == Counter(range(min(total, p.per_replica * sum(s > 0 for s in vector.values()))))


@given(VECTORS, TOTALS, st.randoms(use_true_random=False))
def test_answers_do_not_depend_on_the_order_of_the_arguments(vector, total, random):
    shuffled = dict(random.sample(sorted(vector.items()), len(vector)))
    able, lost = sorted(vector), list(range(0, total, 2))
    for p in policies(total):
        assert p.plan(vector, 3, total) == p.plan(shuffled, 3, total)
        assert p.share(lost, able, vector, {}) == p.share(lost[::-1], able[::-1], shuffled, {})


@st.composite
def losses(draw):
    vector = draw(VECTORS)
    total = draw(TOTALS)
    lost = draw(st.lists(st.integers(0, total - 1), unique=True))
    able = draw(st.lists(st.sampled_from(sorted(vector)), unique=True, min_size=1))
    done = draw(st.dictionaries(st.sampled_from(sorted(vector)), st.integers(0, 20)))
    return vector, total, lost, able, done


@given(losses())
def test_lost_microbatches_are_shared_out_exactly_once(loss):
    vector, total, lost, able, done = loss
    for p in policies(total):
        parts = p.share(lost, able, vector, done)
        check_share(p, parts, lost, able)
        assert counted(parts) == (Counter(lost) if p.constant else Counter())
        assert all(list(indices) == sorted(indices) for indices in parts.values())


@given(VECTORS, TOTALS)
def test_balanced_quotas_differ_by_at_most_one(vector, total):
    work = Balanced().plan(vector, 0, total).work
    sizes = [len(work.get(m, ())) for m, speed in vector.items() if speed]
    assert max(sizes) - min(sizes) <= 1


@given(losses())
def test_balanced_share_levels_the_totals(loss):
    vector, _, lost, able, done = loss
    parts = Balanced().share(lost, able, vector, done)
    totals = {m: done.get(m, 0) + len(parts.get(m, ())) for m in able}
    for m in parts:                                     # who got some is not above anyone else by more than one
        assert totals[m] <= min(totals.values()) + 1


def test_balanced_share_by_example():
    assert Balanced().share([3, 9, 4], [5, 1, 2], {}, {1: 4, 2: 2, 5: 3}) == {2: (3, 4), 5: (9,)}


def test_fewer_microbatches_than_members_leaves_zero_quotas():
    assert Balanced().plan(dict.fromkeys(range(5), 1.0), 0, 2) == Plan({0: (0,), 1: (1,)}, {})
    assert SpeedWeighted().plan(dict.fromkeys(range(5), 1.0), 0, 2).work == {0: (0,), 1: (1,)}


def test_members_without_speed_get_no_quota():
    for p in (Balanced(), SpeedWeighted(), Roles(3, 2), Shrinking(2)):
        plan = p.plan({0: 0.0, 4: 1.0, 7: 0.0, 9: 1.0}, 0, 6)
        assert plan.work.keys() | plan.shadow.keys() <= {4, 9}


@given(VECTORS, TOTALS)
def test_speed_weighted_quotas_follow_speed(vector, total):
    weight = {m: Fraction(s) for m, s in sorted(vector.items()) if s}
    quotas, whole = apportion(total, weight), sum(weight.values())
    assert sum(quotas.values()) == total
    assert all(abs(q - total * weight[m] / whole) < 1 for m, q in quotas.items())


def test_speed_weighted_by_example():
    def sizes(speeds, total):
        work = SpeedWeighted().plan(speeds, 0, total).work
        return [len(work.get(m, ())) for m in sorted(speeds)]

    assert sizes({0: 2.0, 1: 1.0, 2: 1.0}, 8) == [4, 2, 2]
    assert sizes({0: 1.0, 1: 1.0, 2: 1.0}, 8) == [3, 3, 2]          # equal remainders: the lowest members
    assert sizes({0: 1.0, 1: 1e-9}, 8) == [7, 1]                    # nobody is forgotten
    assert sizes({0: 1e300, 1: 1e-300, 2: 1e300}, 5) == [2, 1, 2]


@given(st.dictionaries(st.integers(0, 60), st.floats(1e-6, 1e6), min_size=1, max_size=12), TOTALS)
def test_speed_weighted_leaves_nobody_unmeasured(vector, total):
    total = max(total, len(vector))
    assert SpeedWeighted().plan(vector, 0, total).work.keys() == vector.keys()


def test_speed_weighted_share_follows_speed():
    parts = SpeedWeighted().share(range(6), [0, 1], {0: 2.0, 1: 1.0}, {0: 0, 1: 0})
    assert {m: len(p) for m, p in parts.items()} == {0: 4, 1: 2}
    behind = SpeedWeighted().share(range(3), [0, 1], {0: 2.0, 1: 1.0}, {0: 10, 1: 2})
    assert {m: len(p) for m, p in behind.items()} == {1: 3}


def test_share_works_when_everyone_able_has_speed_zero():
    for p in (Balanced(), SpeedWeighted(), Roles(2, 2)):
        check_share(p, p.share([0, 3], [1, 2], {1: 0.0, 2: 0.0}, {}), [0, 3], [1, 2])


def test_shrinking_says_so_and_shrinks():
    p = Shrinking(2)
    assert not p.constant
    assert p.plan({0: 1.0, 2: 1.0}, 0, 6).work == {0: (0, 1), 2: (2, 3)}
    assert p.share([4, 5], [0, 2], {}, {}) == {}
    assert all(q.constant for q in (Balanced(), SpeedWeighted(), Roles(1, 1)))


@pytest.mark.parametrize("p", [Balanced(), SpeedWeighted(), Roles(2, 2), Shrinking(2)], ids=lambda p: p.name)
@pytest.mark.parametrize("vector", [{}, {0: 0.0}, {0: math.nan}, {0: 1.0, 1: math.inf}, {0: -1.0}], ids=str)
def test_a_vector_that_makes_no_plan_is_refused(p, vector):
    with pytest.raises(ValueError, match="speed"):
        p.plan(vector, 0, 4)


def test_nobody_able_is_refused():
    for p in (Balanced(), SpeedWeighted(), Roles(2, 2)):
        assert p.share([], [], {}, {}) == {}
        with pytest.raises(ValueError, match="nobody is able"):
            p.share([1], [], {}, {})


BROKEN = [
    ("leaves out", Plan({0: (0, 1), 1: (2,)}, {})),
    ("more than once", Plan({0: (0, 1), 1: (1, 2, 3)}, {})),
    ("not there", Plan({0: (0, 1), 1: (2, 3, 4)}, {})),
    ("speed is", Plan({0: (0, 1), 2: (2, 3)}, {})),
    ("not increasing", Plan({0: (1, 0), 1: (2, 3)}, {})),
    ("both work and a shadow", Plan({0: (0, 1), 1: (2, 3)}, {1: (0, 1)})),
    ("nobody owes", Plan({0: (0, 1, 2, 3)}, {1: (0, 7)})),
]


@pytest.mark.parametrize(("offence", "plan"), BROKEN)
def test_check_plan_names_the_offence(offence, plan):
    with pytest.raises(ValueError, match=offence):
        check_plan(Balanced(), plan, {0: 1.0, 1: 1.0, 2: 0.0}, 4)


@pytest.mark.parametrize(("offence", "parts"), [("leaves out", {0: (1,)}), ("more than once", {0: (1, 2), 1: (2,)}),
                                                ("not able", {0: (1,), 3: (2,)}), ("not there", {0: (1, 2, 5)})])
def test_check_share_names_the_offence(offence, parts):
    with pytest.raises(ValueError, match=offence):
        check_share(Balanced(), parts, [1, 2], [0, 1])


def test_deal_refuses_quotas_that_do_not_fit():
    with pytest.raises(AssertionError, match="sum to 3"):
        deal([0, 1], {0: 1, 1: 2})


def test_level_breaks_ties_by_member():
    assert level(3, [4, 2, 7], {}, {}) == {2: 1, 4: 1, 7: 1}
    assert level(1, [4, 2, 7], {2: 1}, {}) == {2: 0, 4: 1, 7: 0}


def test_policies_by_name():
    assert policy("balanced") == Balanced()
    assert policy("speed") == SpeedWeighted()
    assert policy("roles", replicas=4, microbatches=8) == Roles(4, 2)
    assert policy("shrinking", replicas=4, microbatches=8) == Shrinking(2)
    own = Balanced()
    assert policy(own) is own
    for p in policies(4):
        assert isinstance(p, Policy)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"no policy 'blanced'; known are balanced, roles, shrinking, speed"):
        policy("blanced")


@pytest.mark.parametrize("name", ["roles", "shrinking"])
def test_policies_that_need_numbers_ask_for_them(name):
    with pytest.raises(ValueError, match="needs to know replicas"):
        policy(name)
    with pytest.raises(ValueError, match="multiple of replicas: 7 is none of 4"):
        policy(name, replicas=4, microbatches=7)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="already registered"):
        register("balanced", lambda replicas, microbatches: Balanced())
