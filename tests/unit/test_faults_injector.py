"""The injector: each planned fault once, at its place and nowhere else, and proof before the act."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from recover.config import Environment
from recover.faults import FaultPlan, Injector, done_path, injector_for, read_done


class Acts:
    """Actions that only note that they were called, and what the done file said at that moment."""

    def __init__(self, done: Path | None = None) -> None:
        self.seen: list[str] = []
        self.proofs: list[int] = []
        self._done = done

    def table(self) -> dict[str, object]:
        return {name: lambda name=name: self._note(name) for name in ("kill", "stop", "hang", "cut")}

    def _note(self, name: str) -> None:
        self.seen.append(name)
        if self._done is not None:
            self.proofs.append(len(read_done(self._done, "r1")))


def injector(entries: str, acts: Acts, done: Path | None = None) -> Injector:
    faults = FaultPlan.parse(entries).faults
    return Injector(faults, run_id="r1", done=done, act=acts.table())  # type: ignore[arg-type]


def passes(injector: Injector, places: Sequence[tuple[str, int, int | None]]) -> None:
    for place, step, index in places:
        injector.at(place, step, index)


def test_a_fault_happens_at_its_place_step_and_index_only() -> None:
    acts = Acts()
    one = injector("- {replica: 0, step: 3, place: 'compute:1', action: kill}", acts)
    passes(one, [("compute", 2, 1), ("compute", 3, 0), ("compute", 3, None), ("backward", 3, 1), ("fence", 3, None)])
    assert acts.seen == []
    passes(one, [("compute", 3, 1)])
    assert acts.seen == ["kill"]


def test_a_fault_happens_once() -> None:
    acts = Acts()
    one = injector("- {replica: 0, step: '*', place: redo, action: cut}", acts)
    passes(one, [("redo", 4, None), ("redo", 4, None), ("redo", 5, None)])
    assert acts.seen == ["cut"]
    assert one.pending == ()


def test_two_faults_at_one_place_happen_in_the_order_of_the_plan() -> None:
    acts = Acts()
    entry = "- {replica: 0, step: 1, place: fence, action: "
    passes(injector(entry + "cut}\n" + entry + "kill}", acts), [("fence", 1, None)])
    assert acts.seen == ["cut", "kill"]


def test_planned_names_the_first_bucket_to_hold_back() -> None:
    acts = Acts()
    entry = "- {replica: 0, step: 1, place: 'reduce:%d', action: cut}\n"
    one = injector(entry % 4 + entry % 2, acts)
    assert one.planned("reduce", 1) == 2
    assert one.planned("reduce", 0) is None
    assert one.planned("compute", 1) is None
    one.at("reduce", 1, 2)
    assert one.planned("reduce", 1) == 4


def test_proof_is_on_the_disk_before_the_act(tmp_path: Path) -> None:
    done = tmp_path / "events" / "done"
    acts = Acts(done)
    one = injector("- {replica: 3, rank: 1, step: '*', place: exchange, action: kill}", acts, done)
    one.at("exchange", 7)
    assert acts.proofs == [1]
    (proof,) = read_done(done, "r1")
    assert (proof.number, proof.replica, proof.rank, proof.step, proof.place) == (1, 3, 1, 7, "exchange")


def test_what_was_done_in_this_run_is_not_done_again_by_a_restarted_replica(tmp_path: Path) -> None:
    done, entry = tmp_path / "done", "- {replica: 0, step: 1, place: fence, action: kill}"
    acts = Acts()
    injector(entry, acts, done).at("fence", 1)
    injector(entry, acts, done).at("fence", 1)
    assert acts.seen == ["kill"]
    other_run = Injector(FaultPlan.parse(entry).faults, run_id="r2", done=done)
    assert len(other_run.pending) == 1


def test_torn_and_foreign_lines_prove_nothing(tmp_path: Path) -> None:
    done = tmp_path / "done"
    injector("- {replica: 0, step: 1, place: fence, action: kill}", Acts(), done).at("fence", 1)
    whole = done.read_bytes()
    done.write_bytes(b"\xff garbage\n" + whole + whole[:40])
    assert len(read_done(done, "r1")) == 1
    assert read_done(done, "other") == []
    assert read_done(tmp_path / "absent", "r1") == []


def test_an_injector_without_a_plan_does_nothing() -> None:
    idle = Injector()
    idle.at("fence", 0)
    assert idle.planned("reduce", 0) is None


def test_cut_needs_somebody_who_can_cut() -> None:
    faults = FaultPlan.parse("- {replica: 0, step: 1, place: fence, action: cut}").faults
    with pytest.raises(ValueError, match=r"entry 1 .*how to cut"):
        Injector(faults)


def test_the_environment_picks_the_entries_of_the_rank(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("- {replica: 0, step: 1, place: fence, action: kill}\n"
                    "- {replica: 1, step: 1, place: fence, action: kill}\n")
    environ = {"RECOVER_COORDINATOR": "127.0.0.1:1", "RECOVER_REPLICA": "1", "RECOVER_REPLICAS": "2"}
    assert injector_for(Environment.read(environ)).pending == ()
    one = injector_for(Environment.read({**environ, "RECOVER_FAULTS": str(plan)}))
    assert [fault.number for fault in one.pending] == [2]
    assert done_path(None, plan).parent == tmp_path
    assert done_path(tmp_path / "e", plan).parent == tmp_path / "e"
