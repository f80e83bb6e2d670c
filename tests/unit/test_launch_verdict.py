"""The verdict on a run, over every combination that its exit codes are documented for."""
from __future__ import annotations

import signal
from typing import Any

import pytest

from recover.launch import verdict
from recover.launch.verdict import ReplicaEnd, judge

KILLED = -signal.SIGKILL


def end(replica: int, code: int, **values: Any) -> ReplicaEnd:
    return ReplicaEnd(replica=replica, codes=(code,), **{"joined": True, "last_step": 9, "members": (0, 1), **values})


CASES: dict[str, tuple[list[ReplicaEnd], tuple[str, ...], int, str]] = {
    "all finish": ([end(0, 0), end(1, 0)], (), verdict.OK, "finished with 2 of 2 replicas after step 9"),
    "a casualty": ([end(0, 0), end(1, KILLED)], (), verdict.OK, "replica 1 was killed by SIGKILL"),
    "one left": ([end(0, 0), end(1, 75)], (), verdict.OK, "replica 1 left the run"),
    "one failed in the last view": ([end(0, 0), end(1, 1)], (), verdict.MEMBER_FAILED, "failed with exit code 1"),
    "one failed after the others went on": ([end(0, 0, members=(0,)), end(1, 1)], (), verdict.OK, "1 of 2"),
    "one failed, last view unknown": ([end(0, 0, members=None), end(1, 1)], (), verdict.MEMBER_FAILED, "replica 1"),
    "one was ended": ([end(0, 0), end(1, 1, ended=True)], (), verdict.OK, "replica 1 was ended by the launcher"),
    "the newest view counts": ([end(0, 0, members=(0, 1, 2), last_step=3), end(1, 0), end(2, 1)], (), verdict.OK, ""),
    "a fault is missed": ([end(0, 0)], ("entry 1",), verdict.FAULT_MISSED, "did not happen: entry 1"),
    "missed and failed": ([end(0, 0), end(1, 1)], ("entry 1",), verdict.MEMBER_FAILED, "did not happen: entry 1"),
    "all dead": ([end(0, KILLED), end(1, 1, last_step=11)], (), verdict.ALL_DEAD, "after step 11: replica 0 was"),
    "all dead at once": ([end(0, KILLED, last_step=None)], (), verdict.ALL_DEAD, "without a committed step"),
    "all dead and missed": ([end(0, KILLED)], ("entry 2",), verdict.ALL_DEAD, "entry 2"),
    "nobody joined": ([end(0, 0, joined=False), end(1, 3, joined=False)], (), verdict.NOT_JOINED, "exit code 3"),
    "nobody needed to join": ([end(0, 0, joined=False), end(1, 0, joined=False)], (), verdict.OK, "finished"),
    "all left": ([end(0, 75, message="told to go, like all others: stopped after step 9"), end(1, 75)], (), verdict.LEFT,
                 "all replicas had to go: told to go, like all others: stopped after step 9. Start the run again"),
    "all left after a casualty": ([end(0, 75, members=(0,)), end(1, KILLED, last_step=5)], (), verdict.LEFT, "had to go"),
    "one left, its peer died": ([end(0, 75), end(1, KILLED)], (), verdict.ALL_DEAD, "gone"),
    "a failed one quotes its last words": ([end(0, 0), end(1, 1, said="KeyError: 'x'", restarts=2)], (), verdict.MEMBER_FAILED,
                                           "failed with exit code 1 (KeyError: 'x'), started again 2 times"),
    "the culprit is named": ([end(0, -15, joined=False, ended=True), end(1, 3, joined=False)], (), verdict.NOT_JOINED,
                             "replica 1 failed with exit code 3. Its"),
}


@pytest.mark.parametrize(("ends", "missed", "code", "said"), CASES.values(), ids=CASES)
def test_verdicts(ends: list[ReplicaEnd], missed: tuple[str, ...], code: int, said: str) -> None:
    found = judge(ends, missed)
    assert found.code == code
    assert said in found.message


def test_a_replica_has_finished_when_all_of_its_ranks_have() -> None:
    assert judge([ReplicaEnd(replica=0, codes=(0, KILLED), joined=True)]).code == verdict.ALL_DEAD
    assert judge([ReplicaEnd(replica=0, codes=(75, 4), joined=True)]).message.endswith("failed with exit code 4")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_comes_before_everything(number: int, code: int) -> None:
    assert judge([end(0, 0)], ("entry 1",), interrupted=number).code == code
    assert judge([end(0, 75, ended=True), end(1, -9, ended=True)], interrupted=number).code == code


def test_unless_all_could_go_in_order() -> None:
    assert judge([end(0, 75, ended=True), end(1, 75, ended=True)], interrupted=signal.SIGTERM).code == verdict.LEFT


def test_without_a_coordinator_nothing_runs() -> None:
    found = judge([], coordinator="port in use")
    assert (found.code, "port in use" in found.message) == (verdict.NO_COORDINATOR, True)
