"""The examples with replicas of several ranks, as a user starts them: a rank is killed, the end is the undisturbed one."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recover import events
from recover.report.audit import audit

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
SMALL = ["--batch-size", "4", "--layers", "2", "--block", "32", "--width", "32"]
SCRIPTS = {"hsdp": ("train_hsdp.py", 2, SMALL), "pp_tp": ("train_3d.py", 4, ["--mesh", "pp=2,tp=2", "--chunk", "3", *SMALL]),
           "pp_fsdp": ("train_3d.py", 4, ["--mesh", "pp=2,dp_shard=2", *SMALL])}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def launch(folder: Path, name: str, replicas: int, plan: list[dict[str, object]]) -> tuple[dict[int, str], list[float]]:
    """Hash of the state at the end by position, and the losses of all steps; the audit is clean."""
    script, ranks, arguments = SCRIPTS[name]
    folder.mkdir()
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    text = folder / "text.txt"
    text.write_text("\n".join((ROOT / "src" / "recover" / "protocol" / part).read_text() for part in
                              ("position.py", "decision.py", "coordinator.py")))
    done = subprocess.run(
        [sys.executable, "-m", "recover.cli", "launch", "--replicas", str(replicas), "--ranks-per-replica", str(ranks),
         *(["--fault", str(folder / "plan.yaml")] if plan else []), "--events", str(folder / "events"), "--failure-timeout", "20",
         str(ROOT / "examples" / script), "--text", str(text), "--steps", str(STEPS), "--microbatches", "6",
         "--reduction", "exact", "--hash-every", "1", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, timeout=200, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not audit(folder / "events").offences
    ends: dict[int, set[str]] = {}
    losses: set[str] = set()
    for path in (folder / "events").glob("events-*.jsonl"):
        lines = [entry.line for entry in events.read(path)]
        receipts = {line.step: line.attributes["loss"] for line in lines if line.event == events.RECEIPT}
        for line in lines:
            if line.event == events.RUN_END and line.attributes["status"] == "finished":
                ends.setdefault(line.rank, set()).add(line.attributes["state_hash"])
                losses.add(json.dumps([receipts[step] for step in range(STEPS)]))
    assert ends.keys() == set(range(ranks)) and all(len(found) == 1 for found in ends.values()), ends
    assert len(losses) == 1
    return {rank: found.pop() for rank, found in ends.items()}, json.loads(losses.pop())


@pytest.mark.parametrize(("name", "replicas", "victim"), [
    pytest.param("hsdp", 3, (1, 1), marks=pytest.mark.slow), ("pp_tp", 2, (0, 2)),
    pytest.param("pp_fsdp", 2, (1, 3), marks=pytest.mark.slow)])
def test_a_rank_is_killed(tmp_path: Path, name: str, replicas: int, victim: tuple[int, int]) -> None:
    plan: list[dict[str, object]] = [dict(replica=victim[0], rank=victim[1], step=1, place="reduce:1", action="kill")]
    assert launch(tmp_path / "killed", name, replicas, plan) == launch(tmp_path / "alone", name, 1, [])
