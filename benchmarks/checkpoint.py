"""When everything dies: 20 times all processes of a run are killed, half of them while a checkpoint is being written.

    python benchmarks/checkpoint.py [--kills 20] [--megabytes 256]

The run tests' script is started, killed with SIGKILL as a whole (every replica and the coordinator) at a random moment, and
started again with 1 to 4 replicas, until it has been killed often enough; then it goes to its end. Checked: every start goes on
from the newest checkpoint that there was at the kill; no more is lost than one interval, and the one that was being written;
whatever bears a checkpoint's name is whole; the last hash is that of a run to which nothing happened; the audit of all events
together is clean. Then the price is measured, in one process: how long training waits for the copy, and how long
the writing takes beside it.
"""
from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "integration"), str(ROOT / "benchmarks")]

from harness import Result, cluster, run  # noqa: E402

from common import record, rounded, show, summary, workdir  # noqa: E402
from recover import events  # noqa: E402
from recover.report.audit import audit  # noqa: E402
from recover.training.checkpoint import Checkpoints, found, load  # noqa: E402
from recover.training.managed import Managed  # noqa: E402
from recover.training.resuming import taken  # noqa: E402
from recover.training.saving import Author, Saver, Training  # noqa: E402

SCRIPT, EVERY = "run_script:train", 5
BAR = ("after each of the kills the run goes on from the newest checkpoint; at most one interval and what was done while one was "
       "written is lost; the hash at the end is that of the undisturbed run; the audit is clean")


ALONE = Training(lambda kind, value: [value], lambda what, seconds: nullcontext())


def newest(kept: Path) -> int:
    return (found(kept) or [(0, kept)])[0][0]


def done(result: Result) -> int:
    """Steps committed by anyone."""
    return max((said["step"] + 1 for rank in result.ranks.values() for said in rank.all("step")), default=0)


def resumed(result: Result) -> int | None:
    said = {line.attributes["steps"] for rank in result.ranks.values() for line in rank.events(events.RUN_RESUMED)}
    assert len(said) <= 1, said
    return next(iter(said), None)


def killed_once(directory: Path, settings: dict[str, Any], kept: Path, chance: random.Random) -> tuple[dict[str, Any], Result]:
    """Start it, let it do a few steps, and kill everything at once; half the time while a checkpoint is being written."""
    replicas, start = chance.randint(1, 4), newest(kept)
    writing = chance.random() < 0.5
    with cluster(directory, SCRIPT, replicas, settings=settings) as made:
        goal = start + chance.randint(1, 2 * EVERY)
        made.until(lambda: any(said["step"] + 1 >= goal for r in made.ranks for said in made.said(r, "step")), "it trains")
        caught = False
        if writing:
            until = time.monotonic() + 2
            while not caught and time.monotonic() < until:
                caught = any(path.name.startswith(".writing-") for path in kept.iterdir()) if kept.exists() else False
        else:
            time.sleep(chance.random() * 0.1)
        for replica in made.ranks:
            made.signal(replica, signal.SIGKILL)
        made.kill_coordinator()
        made.wait()
        result = made.collect()
    torn = sum(path.name.startswith(".writing-") for path in kept.iterdir()) if kept.exists() else 0
    for steps, path in found(kept):
        assert load(path, 0).flat.tensors, steps
    return dict(replicas=replicas, start=start, resumed=resumed(result), done=done(result), kept=newest(kept), half_written=torn,
                lost=max(0, done(result) - newest(kept))), result


def kill_everything(kills: int, directory: Path, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    chance, kept = random.Random(seed), directory / "kept"
    plain = {"steps": 2 * EVERY * (kills + 2), "linger": 0.001}
    settings = plain | {"checkpoint": {"directory": str(kept), "every": EVERY}}
    rows, results = [], []
    for _ in range(kills):
        row, result = killed_once(directory, settings, kept, chance)
        rows.append(row)
        results.append(result)
    final = run(directory, SCRIPT, 3, settings=settings, patience=300.0)
    whole = run(directory, SCRIPT, 2, settings=plain, patience=300.0)
    together = directory / "events"
    together.mkdir()
    for n, result in enumerate([*results, final]):
        for path in (result.directory / "events").glob("events-*.jsonl"):
            shutil.copy(path, together / path.name.replace("events-", f"events-{n}x", 1))
    offences = [str(each) for each in audit(together).offences if "has no receipt of step" not in each.what]    # not written yet
    return rows, dict(equal=final.hash == whole.hash, hash=final.hash, offences=offences, resumed=resumed(final),
                      expected=rows[-1]["kept"], left=sorted(p.name for p in kept.iterdir() if not p.name.startswith("step-")))


def cost(megabytes: int, directory: Path, times: int = 5) -> dict[str, Any]:
    """Seconds of the copy, of the writing beside training, and what a step that does nothing but compute takes longer."""
    side = 1024
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(max(1, megabytes // 12))))     # AdamW: 3 x 4 MB
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    managed = Managed([model, optimizer])

    class Store:
        def state(self) -> dict[str, Any]:
            return {"learned": None, "exponents": []}

    record_of = events.EventLog(directory / "cost", "cost", 0, 0)
    saver = Saver(Checkpoints(directory / "costs", every=1, keep=1), Author(0, 0, 1, "n", "cost", {}, {}), ALONE, record_of,
                  last=1 << 30, patience=300.0)
    for n in range(times):
        saver.between(n + 1, (0,), lambda: taken(managed, Store(), None, ""))    # type: ignore[arg-type]
        saver.fenced(n)
        saver.settle()
    record_of.close()
    lines = [e.line.attributes for e in events.read(record_of.path) if e.line.event == events.CHECKPOINT_SAVED]
    size = lines[-1]["bytes"] / 1e6
    return dict(megabytes=round(size, 1), copy_ms=rounded(summary([1000 * line["copy"] for line in lines])),
                write_ms=rounded(summary([1000 * line["write"] for line in lines])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=256, help="of the state whose copying and writing is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with workdir() as directory:
        rows, end = kill_everything(options.kills, directory, options.seed)
    with tempfile.TemporaryDirectory() as disk:                         # a real disk: files are flushed to it
        price = cost(options.megabytes, Path(disk))
    columns = ("replicas", "start", "resumed", "done", "kept", "lost", "half_written")
    show("everything killed", columns, [[row[c] for c in columns] for row in rows])
    going_on = all(row["resumed"] in (None, row["start"]) for row in rows) and end["resumed"] == end["expected"]
    lost = max(row["lost"] for row in rows)
    met = going_on and end["equal"] and not end["offences"] and not end["left"] and lost <= 2 * EVERY
    torn = sum(row["half_written"] > 0 for row in rows)
    print(f"{len(rows)} kills, {torn} of them with a checkpoint half written; at most {lost} steps lost (interval {EVERY}); "
          f"hash {'equal' if end['equal'] else 'DIFFERENT'}; {len(end['offences'])} offences")
    print(f"{price['megabytes']} MB: copy {price['copy_ms']['median']:.0f} ms, written beside training in "
          f"{price['write_ms']['median']:.0f} ms (medians)")
    if not options.no_record:
        record("checkpoint", BAR, met, dict(kills=options.kills, every=EVERY, seed=options.seed),
               dict(rows=rows, end=end, lost=lost, cost=price))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
