"""Networks that break in the middle: one consistent view of the members that the coordinator hears, and nobody trains on."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness import Cluster, Result, cluster, run
from netns import Network, unavailable
from run_checks import healthy
from test_run_live import causes

from recover.errors import LEFT
from recover.report.audit import audit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

STEPS, TIMEOUT = 12, 2.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), "run_script:train", 1, settings=dict(steps=STEPS)).hash


@contextmanager
def hosts(tmp_path, replicas: int, kind: type[Cluster] = Cluster,
          settings: dict[str, Any] | None = None) -> Iterator[tuple[Network, Cluster]]:
    """A coordinator on host c (and a second one on host d, if `kind` has one), replica n on host n."""
    if unavailable():
        pytest.skip(unavailable())
    net = Network(["c", "d", *map(str, range(replicas))])
    try:
        kind = type("Netted", (kind,), {
            "host": net.address("c"), "inside": ("ip", "netns", "exec", net.name("c")),
            "second_host": net.address("d"), "second_inside": ("ip", "netns", "exec", net.name("d"))})
        own = {n: {"settings": {"space": net.name(str(n))}, "environ": {"RECOVER_INTERFACE": net.address(str(n))}}
               for n in range(replicas)}
        with cluster(tmp_path, "netns:train", replicas, kind=kind, failure_timeout=TIMEOUT, per_replica=own,
                     settings=settings or dict(steps=STEPS, linger=0.02)) as made:
            yield net, made
    finally:
        net.close()


def broken(tmp_path, replicas: int, stays: list[int], breaks: Callable[[Network], None],
           kind: type[Cluster] = Cluster) -> Result:
    """The network breaks in mid-run, and is whole again when all but those who must leave have finished."""
    goes = [n for n in range(replicas) if n not in stays]
    with hosts(tmp_path, replicas, kind) as (net, made):
        made.until(lambda: len(made.said(0, "step")) > 3, "under way")
        breaks(net)
        made.wait(stays)
        assert all(made.code(n) in (None, LEFT) for n in goes)
        net.heal()
        made.wait(goes)
        result = made.collect()
    healthy(result, STEPS)
    assert [rank.replica for rank in result.survivors] == stays, result.show()
    assert [result.ranks[n].code for n in goes] == [LEFT] * len(goes), result.show()
    last = max(max(rank.receipts) for rank in result.survivors)
    assert all(max(result.ranks[n].receipts, default=-1) < last for n in goes), "nobody trains on without the others"
    return result


@pytest.mark.parametrize("how", ["both ways", "nothing leaves it", "nothing reaches it"])
def test_a_host_that_is_cut_off(tmp_path, alone, how):
    others = ["c", "0", "2"]

    def breaks(net: Network) -> None:
        if how != "nothing reaches it":
            net.drop("1", *others)
        if how != "nothing leaves it":
            for other in others:
                net.drop(other, "1")

    result = broken(tmp_path, 3, [0, 2], breaks)
    assert [member for member, _ in causes(result)] == [1]
    assert result.hash == alone


def test_of_two_halves_the_one_with_the_coordinator_trains_on(tmp_path, alone):
    result = broken(tmp_path, 4, [0, 1], lambda net: net.cut("23", "c01"))
    assert sorted(causes(result)) == [(2, "heartbeat"), (3, "heartbeat")]
    assert result.hash == alone


def test_the_half_that_was_cut_off_comes_back(tmp_path):
    steps = 70
    with hosts(tmp_path, 4, settings=dict(steps=steps, linger=0.03)) as (net, made):
        made.until(lambda: len(made.said(0, "step")) > 3, "under way")
        net.cut("23", "c01")
        made.until(lambda: made.said(0, "step")[-1]["step"] > 20 and "view (0, 3)" in made.show(), "the others train on")
        net.heal()
        made.wait([2, 3])
        assert [made.code(n) for n in (2, 3)] == [LEFT, LEFT]
        made.start_rank(2)
        made.start_rank(3)
        made.wait()
        result = made.collect()
    assert [rank.code for rank in result.ranks.values()] == [0] * 4, result.show()
    assert audit(result.directory / "events").ok
    assert result.hash == run(tmp_path, "run_script:train", 1, settings=dict(steps=steps)).hash
    done = [receipt["who"] for _, receipt in sorted(result.ranks[0].receipts.items())]
    assert {2, 3} <= set(done[0])
    assert {2, 3} <= set(done[-1]), "they take their part again"


@pytest.mark.parametrize("direction", ["both ways", "one way", "other way"])
def test_two_members_cut_off_from_each_other_only(tmp_path, alone, direction):
    """Both reach the coordinator: the one with the higher number goes, whichever direction fails."""
    def breaks(net: Network) -> None:
        if direction != "other way":
            net.drop("1", "2")
        if direction != "one way":
            net.drop("2", "1")

    result = broken(tmp_path, 4, [0, 1, 3], breaks)
    assert causes(result) == [(2, "cut")]
    assert result.hash == alone


def test_the_one_that_nobody_hears_goes_though_its_number_is_lower(tmp_path, alone):
    result = broken(tmp_path, 4, [0, 2, 3], lambda net: net.cut("1", "023"))
    assert causes(result) == [(1, "cut")]
    assert result.hash == alone


def test_only_the_coordinator_is_cut_off_for_a_while(tmp_path, alone):
    """From everybody: training goes on, and when it is back it has lost nobody for good that it should not have."""
    with hosts(tmp_path, 3) as (net, made):
        made.until(lambda: len(made.said(0, "step")) > 2, "under way")
        net.cut("c", "012")
        made.wait()
        result = made.collect()
    healthy(result, STEPS)
    assert len(result.survivors) == 3, result.show()
    assert result.hash == alone
