"""The event log: what is written, what is dropped and counted, what readers accept; receipts and the schema."""
from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import msgspec
import pytest

from recover import events
from recover.events import BadLine, EventLog, Line, NullLog, Receipt, make_receipt, seal, verify

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "events.schema.json"


def lines(path: Path) -> list[Line]:
    return [entry.line for entry in events.read(path)]


def receipt(step: int, loss: float = 0.5) -> Receipt:
    return make_receipt(step=step, view=(0, 1), members=[0, 1], who=[0, 0, 1, 1], divisor=4, loss=loss)


def test_a_line_holds_what_was_emitted(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "run7", 2, 1)
    log.emit(events.VIEW_NEW, view=(0, 3), step=9, members=(0, 2))
    log.emit("recover.other", severity="WARN", at=123, odd={"path": tmp_path, "nan": math.nan})
    log.close()
    assert log.path.name == f"events-replica2-rank1-{os.getpid()}.jsonl"
    first, second = lines(log.path)
    assert (first.schema, first.event, first.run_id, first.replica, first.rank) == (1, events.VIEW_NEW, "run7", 2, 1)
    assert (first.view, first.step, first.severity, first.dropped) == ((0, 3), 9, "INFO", 0)
    assert events.attributes_of(first) == events.ViewNew(members=(0, 2))
    assert (second.severity, second.time_unix_nano, second.view) == ("WARN", 123, None)
    assert second.attributes["odd"]["nan"] is None
    assert events.attributes_of(second) is None


def test_a_process_outside_replicas_names_its_role(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "r", None, None, role="coordinator")
    log.emit("recover.coordinator.start")
    log.close()
    assert log.path.name.startswith("events-coordinator-")
    assert lines(log.path)[0].replica is None


class SlowDisk:
    """Stands in for os.write: the first write waits until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing, self.go = threading.Event(), threading.Event()
        self._write = os.write
        monkeypatch.setattr(events.os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        self.writing.set()
        assert self.go.wait(20)
        return self._write(file, data)


def test_a_stalled_disk_costs_events_and_the_next_line_counts_them(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    log = EventLog(tmp_path, "r", 0, 0, capacity=4)
    log.emit("first")
    assert disk.writing.wait(20)                # the writer holds "first"; from here on the queue only fills
    for number in range(10):
        log.emit("event", number=number)        # returns although nothing is written
    log.receipt(receipt(0))                     # has room of its own
    log.receipt(receipt(1))
    disk.go.set()
    log.close(20)
    found = lines(log.path)
    assert [line.event for line in found] == ["first"] + ["event"] * 4 + [events.RECEIPT] * 2
    assert [line.attributes.get("number") for line in found[1:5]] == [0, 1, 2, 3]
    assert sum(line.dropped for line in found) == 6
    chain = [msgspec.convert(line.attributes, Receipt) for line in found[5:]]
    assert chain[1].previous == chain[0].digest != ""


def test_a_full_disk_never_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, write = threading.Event(), os.write

    def full_once(file: int, data: bytes) -> int:
        if not failed.is_set():
            failed.set()
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(events.os, "write", full_once)
    log = EventLog(tmp_path, "r", 0, 0)
    log.emit("lost")
    assert failed.wait(20)
    log.emit("kept")
    log.close(20)
    (kept,) = lines(log.path)
    assert (kept.event, kept.dropped) == ("kept", 1)


def test_what_json_cannot_hold_is_shown_and_the_writer_lives_on(tmp_path: Path) -> None:
    loop: list[object] = []
    loop.append(loop)
    log = EventLog(tmp_path, "r", 0, 0)
    log.emit("loop", loop=loop)
    log.emit("huge", number=1 << 200)
    log.emit("after")
    log.close(20)
    found = lines(log.path)
    assert [line.event for line in found] == ["loop", "huge", "after"]
    assert "unencodable" in found[0].attributes


def test_after_close_and_in_a_forked_child_nothing_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "r", 0, 0)
    child = os.fork()
    if child == 0:
        log.emit("child")
        log.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log.emit("parent")
    log.close()
    log.close()
    log.emit("late")
    assert [line.event for line in lines(log.path)] == ["parent"]


def test_no_directory_no_file(tmp_path: Path) -> None:
    log = events.open_log(None, "r", 0, 0)
    assert isinstance(log, NullLog)
    log.emit("x")
    log.receipt(receipt(0))
    log.close()
    real = events.open_log(tmp_path / "made" / "here", "r", 0, 0)
    real.close()
    assert isinstance(real, EventLog)


def test_a_torn_last_line_is_skipped_and_any_other_bad_line_is_named(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "r", 0, 0)
    for _ in range(3):
        log.emit("event")
    log.close()
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-20])
    assert len(lines(log.path)) == 2
    parts = whole.splitlines(keepends=True)
    log.path.write_bytes(parts[0] + parts[1][:-20] + b"\n" + parts[2])
    with pytest.raises(BadLine, match="line 2"):
        lines(log.path)
    log.path.write_bytes(parts[0].replace(b'"schema":1', b'"schema":2'))
    with pytest.raises(BadLine, match="schema 2"):
        lines(log.path)


def test_readers_do_not_swallow_endless_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LINE", 100)
    path = tmp_path / "events-x.jsonl"
    path.write_bytes(b"x" * 1000)
    with pytest.raises(BadLine, match="longer than 100"):
        lines(path)


@pytest.mark.parametrize("key", [b"", b"secret"])
@pytest.mark.parametrize("loss", [0.1, -0.0, math.nan, math.inf, 5e-324, 1e308])
def test_a_seal_survives_json_and_notices_any_change(key: bytes, loss: float) -> None:
    sealed = seal(receipt(3, loss), "before", key)
    back = msgspec.json.decode(msgspec.json.encode(sealed), type=Receipt)
    assert back == sealed
    assert verify(back, "before", key) is None
    assert back.loss_bits == events.loss_bits(loss)
    changes = {"step": 4, "view": (0, 2), "members": (0,), "who": (0, 0, 1, 0), "divisor": 5.0, "loss": 0.25,
               "loss_bits": "0" * 14 + "27", "checksums": (1,), "state_hash": "ab", "policy_constant": False,
               "skipped": (1,), "previous": "x", "digest": "0" * 64}
    assert set(changes) == set(Receipt.__struct_fields__)
    for name, value in changes.items():
        assert verify(msgspec.structs.replace(back, **{name: value}), "before", key) is not None, name


def test_without_the_key_nobody_forges_a_seal() -> None:
    forged = seal(msgspec.structs.replace(receipt(1), divisor=5.0), "", b"guess")
    assert verify(forged, "", b"secret") is not None
    assert verify(seal(receipt(1), ""), "", b"secret") is not None


def test_the_schema_in_the_documentation_is_current() -> None:
    assert SCHEMA_FILE.read_text() == events.json_schema_text(), "run: recover events-schema > docs/events.schema.json"


def test_the_schema_describes_every_known_event() -> None:
    schema = json.loads(events.json_schema_text())
    named = {case["if"]["properties"]["event"]["const"] for case in schema["allOf"][1:]}
    assert named == set(events.KNOWN)
    assert "who" in schema["$defs"]["Receipt"]["required"]
