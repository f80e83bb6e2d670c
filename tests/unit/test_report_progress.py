"""Events in, state of a run out; and the tables, views and pictures made of it."""
from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from recover import events
from recover.report import curves, live, tables
from recover.report.progress import LINE_LIMIT, Progress, Tail, replay

B = 8
SECOND = 1_000_000_000


def event(name: str, origin: int | None = 0, *, at: float = 0.0, step: int | None = None, view: Any = None,
          **attributes: Any) -> dict[str, Any]:
    return {"schema": 1, "event": f"recover.{name}", "time_unix_nano": int(at * SECOND), "severity": "INFO",
            "run_id": "x", "replica": origin, "rank": 0, "view": view, "step": step, "attributes": attributes}


def receipt(step: int, replica: int, members: list[int], *, who: list[Any] | None = None,
            **more: Any) -> dict[str, Any]:
    who = [members[i % len(members)] for i in range(B)] if who is None else who
    values = {"members": members, "who": who, "divisor": len(who), "loss": 5.0 - step / 10, **more}
    return event("step.receipt", replica, at=float(step), step=step, view=[1, 1], **values)


def view(number: int, members: list[int], replica: int, **more: Any) -> dict[str, Any]:
    return event("view.new", replica, view=[1, number], members=members, **more)


def run_with_a_loss() -> list[dict[str, Any]]:
    """Three replicas; replica 2 is killed in step 2 after replicas 0 and 1 have committed steps 0 and 1."""
    events = [view(1, [0, 1, 2], replica) for replica in range(3)]
    events += [receipt(step, replica, [0, 1, 2]) for step in range(2) for replica in range(3)]
    events += [event("fault.injected", None, at=2.5, step=2, number=1, replica=2, rank=0, place="compute:1",
                     action="kill", pid=7, injected_unix_nano=2 * SECOND)]
    for replica, detect in ((0, 0.004), (1, 0.006)):
        events += [event("replica.lost", replica, at=2.0 + detect, step=2, lost=2, cause="eof",
                         noticed_by=f"replica {replica}"),
                   view(2, [0, 1], replica, at=2.01, step=2),
                   event("recovery", replica, at=2.1, step=2, view=[1, 2], recomputed=1 + replica,
                         phases={"detect": detect, "exchange": 0.001 * (1 + replica), "reform": 0.002,
                                 "recompute": 0.03, "redo": 0.01, "commit": 0.001})]
    events += [receipt(step, replica, [0, 1]) for step in range(2, 4) for replica in range(2)]
    events += [event("run.end", replica, at=5.0, status="finished", final_loss=4.7, state_hash="ab" * 16)
               for replica in range(2)]
    return events


def fold(events: list[dict[str, Any]]) -> Progress:
    progress = Progress()
    for one in events:
        progress.follow(one)
    return progress


def test_steps_losses_and_quotas() -> None:
    progress = fold(run_with_a_loss())
    assert {index: step.loss for index, step in progress.steps.items()} == {0: 5.0, 1: 4.9, 2: 4.8, 3: 4.7}
    assert progress.steps[1].quotas == {0: 3, 1: 3, 2: 2}
    assert progress.last is not None
    assert progress.last.quotas == {0: 4, 1: 4}
    assert progress.alive == (0, 1)
    assert progress.seconds_per_step() == 1.0
    assert progress.state_hash == "ab" * 16
    assert progress.unwhole(4, B) == []


def test_a_loss_is_timed_by_the_slowest_survivor_and_counted_over_all() -> None:
    loss = fold(run_with_a_loss()).losses[2]
    assert (loss.step, loss.cause, loss.recomputed) == (2, "eof", 3)
    assert loss.phases["exchange"] == 0.002
    assert loss.detection == pytest.approx(0.004)       # from the kill to the first survivor's word
    assert loss.recovery == pytest.approx(0.002 + 0.002 + 0.03 + 0.01 + 0.001)


def test_without_a_record_of_the_kill_detection_is_what_survivors_took_it_to_be() -> None:
    events = [one for one in run_with_a_loss() if one["event"] != "recover.fault.injected"]
    assert fold(events).losses[2].detection == 0.006


def test_the_order_between_files_does_not_matter() -> None:
    events = run_with_a_loss()
    by_file = [one for replica in (1, None, 2, 0) for one in events if one["replica"] == replica]
    straight, mixed = fold(events), fold(by_file)
    assert mixed.losses == straight.losses
    assert mixed.steps == straight.steps
    assert mixed.unwhole(4, B) == []


def test_who_ends_the_run_is_not_lost() -> None:
    events = [*run_with_a_loss(), view(3, [1], 1, at=5.1)]
    told = [*events, event("replica.lost", 1, at=5.2, lost=0, cause="leave")]
    for progress in (fold(events), fold(told), fold(told[::-1])):
        assert set(progress.losses) == {2}
        assert progress.alive == (0, 1)


def test_who_ends_by_failing_is_lost_and_has_no_say_about_the_hash() -> None:
    progress = fold([view(1, [0, 1], 0), event("run.end", 1, status="evicted", state_hash="ee" * 16),
                     view(2, [0], 0), event("run.end", 0, status="finished", state_hash="ab" * 16)])
    assert set(progress.losses) == {1}
    assert progress.state_hash == "ab" * 16


def test_two_deaths_in_one_view_count_what_was_recomputed_once() -> None:
    progress = fold([view(1, [0, 1, 2], 0), view(2, [0], 0),
                     event("recovery", 0, view=[1, 2], step=1, recomputed=5, phases={"detect": 0.1})])
    assert sorted(progress.losses) == [1, 2]
    assert progress.recomputed == 5
    assert all(loss.step == 1 for loss in progress.losses.values())


@pytest.mark.parametrize(("break_it", "said"), [
    (lambda events: events.remove(receipt(3, 1, [0, 1])), "replica 1 has no receipt for step 3"),
    (lambda events: events.append(receipt(3, 1, [0, 1], who=[0, 1] * 3)), "step 3: replica 1 summed 6 microbatches"),
    (lambda events: events.append(receipt(3, 1, [0, 1], who=[-1, 1] * 4)), "step 3: replica 1 lacks microbatch 0"),
    (lambda events: events.append(receipt(3, 1, [0, 1], divisor=0)), "step 3: replica 1 divided by 0"),
    (lambda events: events.append(event("step.receipt", 1, step=3)), "recover.step.receipt of replica 1 is malformed"),
])
def test_what_is_not_whole_is_named(break_it: Any, said: str) -> None:
    events = run_with_a_loss()
    assert fold(events).unwhole(4, B) == []
    break_it(events)
    assert any(said in offence for offence in fold(events).unwhole(4, B))


def test_a_shrunken_batch_and_an_empty_run_are_not_whole() -> None:
    shrunken = fold([view(1, [0], 0), receipt(0, 0, [0], who=[0] * (B - 1))])
    assert shrunken.unwhole(1, B) == [f"step 0 summed {B - 1} microbatches instead of {B}"]
    assert Progress().unwhole(1, B) == ["there are no receipts"]


def test_hashes_that_differ_are_no_hash() -> None:
    events = [*run_with_a_loss(), event("run.end", 1, status="finished", state_hash="cd" * 16)]
    assert fold(events).state_hash is None


def test_strange_events_change_nothing() -> None:
    progress = fold([{}, {"event": "recover.step.receipt"}, {"event": "recover.novelty", "attributes": {}},
                     {"event": "recover.view.new", "attributes": None}])
    assert progress == Progress()


def test_what_is_folded_is_what_is_written() -> None:
    """The synthetic events have the attributes of the real ones."""
    for one in run_with_a_loss():
        if one["event"] != events.RECEIPT:
            msgspec.convert(one["attributes"], events.KNOWN[one["event"]], strict=True)


def write(path: Path, events: list[dict[str, Any]]) -> None:
    with path.open("ab") as file:
        file.writelines(json.dumps(one).encode() + b"\n" for one in events)


def test_the_tail_reads_only_what_is_new_and_complete(tmp_path: Path) -> None:
    tail, path = Tail(tmp_path), tmp_path / "events-replica0-rank0-1.jsonl"
    assert tail.read() == []
    first, second = event("a", at=1), event("b", at=2)
    write(path, [first])
    whole = json.dumps(second).encode() + b"\n"
    with path.open("ab") as file:
        file.write(whole[:20])
    assert tail.read() == [first]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(whole[20:])
    assert tail.read() == [second]


def test_the_tail_merges_files_by_time_and_skips_garbage(tmp_path: Path) -> None:
    write(tmp_path / "events-b.jsonl", [event("late", at=3), event("early", at=1)])
    (tmp_path / "events-a.jsonl").write_bytes(b"{torn\n[1]\n\xff\xfe\n")
    write(tmp_path / "events-a.jsonl", [event("middle", at=2)])
    (tmp_path / "other.jsonl").write_text("{}\n")
    tail = Tail(tmp_path)
    assert [one["event"] for one in tail.read()] == ["recover.early", "recover.middle", "recover.late"]
    assert tail.skipped == 3


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "events-a.jsonl"
    path.write_bytes(b"x" * (LINE_LIMIT + 1))
    tail = Tail(tmp_path)
    assert tail.read() == []
    assert tail.skipped == 1
    with path.open("ab") as file:
        file.write(b"x\n")
    write(path, [event("after")])
    assert [one["event"] for one in tail.read()] == ["recover.after"]


def test_replay_is_following_everything(tmp_path: Path) -> None:
    for replica in (0, 1, 2, None):
        own = [one for one in run_with_a_loss() if one["replica"] == replica]
        write(tmp_path / f"events-replica{replica}.jsonl", own)
    assert replay(tmp_path).losses == fold(run_with_a_loss()).losses


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=140, color_system=None)


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_the_panel_shows_step_loss_speed_and_replicas() -> None:
    shown = console()
    shown.print(live.draw(fold(run_with_a_loss()), "with kills", steps=4, tokens_per_step=1000))
    text = text_of(shown)
    for part in ("with kills", "step 4/4", "loss 4.7000", "tokens/s 1,000", "replicas alive 2", "lost in step 2",
                 "████ 4 microbatches"):
        assert part in text


def test_the_panel_of_a_run_that_has_not_begun() -> None:
    shown = console()
    shown.print(live.draw(Progress(), "soon", steps=4, tokens_per_step=1000))
    assert "step 0/4" in text_of(shown)


def test_without_a_terminal_there_are_lines_each_said_once() -> None:
    shown = console()
    events = run_with_a_loss()
    with live.LiveView(shown, "run", steps=4, tokens_per_step=1000, every=2) as view_:
        progress = Progress()
        for one in events:
            progress.follow(one)
            view_.show(progress)
    lines = text_of(shown).splitlines()
    assert [line for line in lines if "dead" in line] == ["run: replica 2 is dead, 2 go on"]
    steps = [line.split("  ")[0] for line in lines if "step" in line]
    assert steps == ["run: step 1/4", "run: step 3/4", "run: step 4/4"]


def test_on_a_terminal_the_panel_is_redrawn() -> None:
    shown = console(terminal=True)
    with live.LiveView(shown, "run", steps=4, tokens_per_step=1000) as view_:
        view_.show(fold(run_with_a_loss()))
    assert "replicas alive 2" in text_of(shown)


def reference() -> Progress:
    return fold([view(1, [0], 0), *(receipt(step, 0, [0]) for step in range(4)),
                 event("run.end", 0, status="finished", state_hash="ab" * 16)])


KILLS = (tables.Kill(2, 2, "compute:1"), tables.Kill(7, 3, "optimizer"))


def test_the_comparison_says_what_is_equal() -> None:
    shown = console()
    shown.print(tables.comparison(reference(), fold(run_with_a_loss())))
    lines = {line.split("│")[1].strip(): line for line in text_of(shown).splitlines() if line.count("│") > 3}
    assert "yes" in lines["final loss"]
    assert "yes" in lines["hash of weights and optimizer state"]
    assert f"{B} in each of 4" in lines["microbatches per step"]
    assert "3 at first, 2 at the end" in lines["replicas"]


def test_the_comparison_says_what_is_not_equal() -> None:
    shown, other = console(), [*run_with_a_loss()[:-2], event("run.end", 0, status="finished", state_hash="cd" * 16)]
    shown.print(tables.comparison(reference(), fold(other)))
    line = next(line for line in text_of(shown).splitlines() if "hash of" in line)
    assert "no" in line
    assert "yes" not in line


def test_two_runs_without_a_hash_are_not_called_equal() -> None:
    shown = console()
    shown.print(tables.comparison(Progress(), Progress()))
    assert "yes" not in text_of(shown)


def test_the_table_of_kills_shows_what_was_measured_and_nothing_else() -> None:
    shown = console()
    shown.print(tables.kills(KILLS, fold(run_with_a_loss())))
    first, second = (line for line in text_of(shown).splitlines() if "compute:" in line or "optimizer" in line)
    assert "4.0 ms" in first
    assert "45.0 ms" in first
    assert second.count(" - ") == 3


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "made" / "curves.png"
    curves.plot(path, reference(), fold(run_with_a_loss()), KILLS[:1])
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 10_000


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        curves.plot(tmp_path / "curves.png", Progress(), Progress())
