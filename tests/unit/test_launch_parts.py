"""The launcher's parts that need no children: options, environment, glimpses of event files, output."""
from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from recover import events
from recover.config import Environment
from recover.launch import glimpse as glimpsing
from recover.launch.glimpse import Glimpse, glimpse
from recover.launch.options import Options, Where, free_ports, host_and_port, rank_environment
from recover.launch.output import Output, Sink


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


@pytest.mark.parametrize(("settings", "said"), [
    ({"replicas": 0}, "--replicas"), ({"replicas": 5000}, "at most 4096 ranks"), ({"ranks_per_replica": 0}, "--ranks"),
    ({"threads_per_rank": 0}, "--threads-per-rank"), ({"grace": 0.0}, "--grace"),
    ({"failure_timeout": 0.0}, "failure_timeout"), ({"listen": "localhost"}, "HOST:PORT"),
    ({"listen": "[::1]:99999"}, "HOST:PORT"), ({"script": Path("absent.py")}, "no script absent"),
    ({"restart": -1}, "--restart"), ({"spares": 2}, "--spares"), ({"min_replicas": 3}, "--min-replicas"),
    ({"below": "hope"}, "--below"), ({"max_replicas": 1}, "--max-replicas"), ({"join": "h:1"}, "belong together"),
    ({"join": "h:1", "replica": 2}, "--token-file"), ({"join": "nowhere", "replica": 2}, "--join must be HOST:PORT"),
    ({"token_file": Path("absent")}, "no token file"), ({"faults": Path("absent.yaml")}, r"absent\.yaml"),
])
def test_what_cannot_work_is_refused_before_anything_starts(script: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Options(**{"script": script, "replicas": 2, **settings})


def test_each_launch_has_an_identity_of_its_own(script: Path) -> None:
    assert Options(script=script, replicas=1).run_id != Options(script=script, replicas=1).run_id


def test_addresses() -> None:
    assert host_and_port("127.0.0.1:80") == ("127.0.0.1", 80)
    assert host_and_port("[::1]:0") == ("::1", 0)


def test_the_environment_is_what_a_rank_reads(script: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("[]")
    options = Options(script=script, replicas=3, ranks_per_replica=2, faults=plan, interface="lo", run_id="x",
                      failure_timeout=1.5)
    where = Where(coordinator="127.0.0.1:7", token_file=tmp_path / "t", events=tmp_path / "e", master_ports={0: 4, 2: 6})
    stale = {"PATH": "/bin", "RECOVER_FAULTS": "of an outer run", "RECOVER_OTHER": "1", "OMP_NUM_THREADS": "64"}
    environ = rank_environment(options, where, 2, 1, stale)
    read = Environment.read(environ)
    assert (read.replica, read.replicas, read.rank, read.world_size, read.run_id) == (2, 3, 1, 2, "x")
    assert (read.coordinator, read.events, read.faults, read.interface) == ("127.0.0.1:7", tmp_path / "e", plan, "lo")
    assert (environ["MASTER_PORT"], environ["PATH"], environ["OMP_NUM_THREADS"]) == ("6", "/bin", "1")
    assert float(environ["RECOVER_FAILURE_TIMEOUT"]) == 1.5
    assert "RECOVER_OTHER" not in environ
    no_plan = Options(script=script, replicas=3)
    assert "RECOVER_FAULTS" not in rank_environment(no_plan, where, 0, 0, stale)


def test_spares_and_floor_reach_the_ranks(script: Path, tmp_path: Path) -> None:
    where = Where(coordinator="h:7", token_file=tmp_path / "t", events=tmp_path / "e", master_ports={0: 4})
    options = Options(script=script, replicas=4, spares=1, min_replicas=2, below="stop")
    read = Environment.read(rank_environment(options, where, 0, 0, {}))
    assert (read.spares, read.min_replicas, read.below) == (1, 2, "stop")
    plain = Environment.read(rank_environment(Options(script=script, replicas=4), where, 0, 0, {}))
    assert (plain.spares, plain.min_replicas, plain.below) == (0, 0, "wait")


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with socket.socket() as one:
        one.bind(("127.0.0.1", ports[0]))


def log_of(directory: Path, replica: int, rank: int, steps: int, members: tuple[int, ...] = (0, 1)) -> Path:
    log = events.EventLog(directory, "run", replica, rank)
    log.emit(events.RUN_JOINED, members=members)
    for step in range(steps):
        log.receipt(events.make_receipt(step=step, view=(0, 1), members=members, who=[0], divisor=1, loss=1.0))
    log.close(20)
    return log.path


def test_a_glimpse_says_how_far_all_ranks_of_a_replica_got(tmp_path: Path) -> None:
    assert glimpse(tmp_path, "run", 1) == Glimpse()
    log_of(tmp_path, 1, 0, 7)
    log_of(tmp_path, 1, 1, 5)
    log_of(tmp_path, 11, 0, 3)
    assert glimpse(tmp_path, "run", 1) == Glimpse(True, 4, (0, 1))
    assert glimpse(tmp_path, "yesterday", 1) == Glimpse()


def test_a_glimpse_reads_the_ends_of_long_and_torn_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log_of(tmp_path, 0, 0, 300)
    path.write_bytes(path.read_bytes()[:-50])
    monkeypatch.setattr(glimpsing, "END", 2000)
    assert glimpse(tmp_path, "run", 0) == Glimpse(True, 298, (0, 1))


def test_a_glimpse_of_one_life(tmp_path: Path) -> None:
    path = log_of(tmp_path, 1, 0, 7)
    path.rename(path.with_name("events-replica1-rank0-99.jsonl"))
    other = log_of(tmp_path, 1, 0, 2)
    pid = int(other.stem.rpartition("-")[2])
    assert glimpse(tmp_path, "run", 1, [99]).last_step == 6
    assert glimpse(tmp_path, "run", 1, [pid]).last_step == 1
    assert glimpse(tmp_path, "run", 1, [98]) == Glimpse()


def read_all(file: int) -> bytes:
    text = b""
    while data := os.read(file, 1 << 16):
        text += data
    return text


def test_a_sink_that_nobody_empties_drops_counts_and_says_so() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"-" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)          # full: the next write waits for a reader
    sink = Sink(writing, limit=1000)
    for _ in range(500):
        sink.put(b"x" * 99 + b"\n")             # returns though nothing can be written
    sink.close(0)
    held = bytearray()
    while b"dropped" not in held:
        held += os.read(reading, 1 << 16)
    os.close(writing)
    written = bytes(held).count(b"x" * 99)
    assert 10 <= written <= 20                  # what the queue holds, and what the thread had in hand
    assert b"[launch] %d lines of output dropped" % (500 - written) in held
    os.close(reading)


def test_output_is_prefixed_line_by_line_and_drained_at_the_end() -> None:
    (out_reading, out), (err_reading, err), (child_reading, child) = os.pipe(), os.pipe(), os.pipe()
    output = Output(out, err)
    os.write(child, b"one\n\ntw")
    os.write(child, b"o\r\nthree")
    output.follow(child_reading, "[r1] ", "stdout")
    output.say("first\nsecond")
    output.close(20)                            # although the child still holds its end
    for file in (out, err, child):
        os.close(file)
    assert read_all(out_reading) == b"[r1] one\n[r1] \n[r1] two\n[r1] three\n"
    assert read_all(err_reading) == b"[launch] first\n[launch] second\n"
    os.close(out_reading)
    os.close(err_reading)


def said(*lines: bytes) -> str:
    output = Output(os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY))
    reading, writing = os.pipe()
    source = output.follow(reading, "", "stderr")
    for line in lines:
        os.write(writing, line + b"\n")
    os.close(writing)
    assert source.ended.wait(20)
    output.close(20)
    return source.last


def test_the_last_words_are_the_exception_not_what_follows_it() -> None:
    trace = (b"Traceback (most recent call last):", b'  File "train.py", line 3', b"    x()", b"ValueError: no such file")
    assert said(b"hello", *trace, b"", b"a warning at exit") == "ValueError: no such file"
    assert said(b"hello", b"no such text file", b"") == "no such text file"
    assert said() == ""
    assert len(said(b"x" * 5000)) == 300
