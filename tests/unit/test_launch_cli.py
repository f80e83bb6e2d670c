"""The command line: what it passes on, its exit codes, and that light commands stay light."""
from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import recover.launch
from recover import events
from recover.cli import app
from recover.simulate.protocol import number


def test_launch_passes_everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(recover.launch, "launch", lambda options: seen.append(options) or 6)
    script = tmp_path / "train.py"
    script.write_text("")
    done = CliRunner().invoke(app, ["launch", "--replicas", "4", "--events", str(tmp_path / "new" / "events"),
                                    "--failure-timeout", "2", str(script), "--replicas", "9", "-x", "last"])
    assert done.exit_code == 6, done.output
    (options,) = seen
    assert (options.replicas, options.failure_timeout, options.script) == (4, 2.0, script)
    assert options.arguments == ("--replicas", "9", "-x", "last")
    assert options.events.is_dir()


def test_audit_exits_by_its_findings(tmp_path: Path) -> None:
    log = events.EventLog(tmp_path, "run", 0, 0)
    for step in range(3):
        log.receipt(events.make_receipt(step=step, view=(0, 1), members=[0], who=[0, 0], divisor=2, loss=1.0))
    log.close(20)
    clean = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert (clean.exit_code, "clean" in clean.output) == (0, True), clean.output
    log.path.write_text(log.path.read_text().replace('"who":[0,0]', '"who":[0,1]', 1))
    found = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert found.exit_code == 1
    assert f"OFFENCE {log.path.name}, line 1, step 0" in found.output
    assert CliRunner().invoke(app, ["audit", str(tmp_path / "absent")]).exit_code == 2
    (tmp_path / "empty").mkdir()
    empty = CliRunner().invoke(app, ["audit", str(tmp_path / "empty")])
    assert (empty.exit_code, "recover launch --events" in empty.output) == (2, True)


def test_events_schema_prints_what_the_documentation_holds() -> None:
    assert CliRunner().invoke(app, ["events-schema"]).output == events.json_schema_text()


@pytest.mark.parametrize("seeds", ["5", "5:5", "9:3", "a:b", ":"])
def test_seeds_that_are_no_range_are_refused(seeds: str) -> None:
    assert CliRunner().invoke(app, ["simulate", "protocol", "--seeds", seeds]).exit_code == 2


def test_light_commands_need_no_torch() -> None:
    code = ("import sys, recover.cli, recover.launch, recover.report.audit, recover.faults\n"
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0


class FakeSimulation:
    """Stands in for `recover.simulate.protocol`."""

    def __init__(self, broken: tuple[int, str] | None) -> None:
        self.broken, self.seen = broken, ()
        self.number = number

    def run_seeds(self, first: int, last: int, **options: int | None) -> tuple[Counter[int], tuple[int, str] | None]:
        self.seen = (first, last, options)      # type: ignore[assignment]
        return Counter({1: 3, 2: 4}), self.broken


def test_simulate_prints_the_seed_that_broke_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSimulation((17, "I1: microbatch 3 twice"))
    monkeypatch.setitem(sys.modules, "recover.simulate.protocol", fake)
    done = CliRunner().invoke(app, ["simulate", "protocol", "--seeds", "10:20", "--positions", "2"])
    assert done.exit_code == 1
    assert "seed 17: I1: microbatch 3 twice" in done.output
    assert "recover simulate protocol --seeds 17:18 --positions 2" in done.output
    assert fake.seen == (10, 20, {"positions": range(2, 3), "processes": None})
    assert CliRunner().invoke(app, ["simulate", "protocol", "--positions", "8:2"]).exit_code == 2
    done = CliRunner().invoke(app, ["simulate", "protocol", "--seeds", "10:20", "--positions", "2:8"])
    assert "recover simulate protocol --seeds 17:18 --positions 5" in done.output
    monkeypatch.setitem(sys.modules, "recover.simulate.protocol", FakeSimulation(None))
    done = CliRunner().invoke(app, ["simulate", "protocol", "--seeds", "10:17"])
    assert (done.exit_code, "7 schedules hold" in done.output) == (0, True)
