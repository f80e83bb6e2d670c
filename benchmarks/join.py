"""Joining a run under way: what it costs those who train, and whether the joiner is their equal: `python benchmarks/join.py`.

1. Three replicas of about 10 million parameters train; a fourth joins. The steps of the three while it joins are compared with
   the median of their steps before. Microbatches mostly sleep: two cores can't give four busy replicas what they have on
   machines of their own, and what is looked for is waiting, not sharing a core. They last as long as one of 512 tokens
   computes on a core of its own: 6 x 10M x 512 = 31 GFLOP, about half a second (`--linger` for others).
2. Twenty joins of a small model in `exact`, among them some whose donor or whose joiner is killed in the middle, and some of
   two at once. The joiner's state is hashed at every step from its first on, and compared with the others' by the audit.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

sys.path[:0] = [str(common.ROOT / "src"), str(common.ROOT / "tests" / "integration")]

from harness import Result, cluster, run  # noqa: E402
from run_checks import unwritten  # noqa: E402

from recover.report.audit import audit  # noqa: E402

SCRIPT = "run_script:train"
WIDTH, BEFORE, AFTER = 1280, 10, 12                     # about 10 million parameters; steps
LARGE = dict(width=WIDTH, reduction="fast", hash_every=0, microbatches=12, linger=0.5, clip=False, steps=BEFORE + AFTER + 12)
SMALL = dict(steps=24, linger=0.02)
SLOW = dict(piece=4096, drip=0.1)                       # the copy takes some steps
LIMIT = 0.2                                             # of a step
KINDS = ("plain", "donor killed", "joiner killed", "two at once")


def durations(result: Result, replica: int) -> dict[int, float]:
    """step -> seconds since the step before."""
    at = {said["step"]: said["at"] for said in result.ranks[replica].all("step")}
    return {step: at[step] - at[step - 1] for step in at if step - 1 in at}


def delay(directory: Path, linger: float) -> dict[str, Any]:
    """One join of the large model: the three's steps before, and from its start until it is level."""
    with cluster(directory, SCRIPT, 3, settings=LARGE | dict(linger=linger)) as made:
        made.until(lambda: any(said["step"] >= BEFORE for said in made.said(0, "step")), "the steps before")
        made.start_rank(3)
        made.wait(seconds=240)
        result = made.collect()
    level = next(line for line in result.ranks[3].lines if line.event == "recover.join.level")
    steps = [durations(result, replica) for replica in range(3)]
    before = statistics.median(seconds for each in steps for step, seconds in each.items() if 3 <= step <= BEFORE)
    during = [seconds for each in steps for step, seconds in each.items() if BEFORE < step <= level.step]
    copies = [line.attributes for r in range(3) for line in result.ranks[r].events("recover.join.copied")]
    parameters = copies[0]["bytes"] // 12               # with AdamW's two moments
    return dict(parameters=parameters, step_s=round(before, 4), longest_s=round(max(during), 4), level_at=level.step,
                delay=round(max(during) / before - 1, 4), copy_s=max(copy["seconds"] for copy in copies),
                catching_up_s=round(level.attributes["seconds"], 3))


def joined(directory: Path, kind: str, expected: str) -> dict[str, Any]:
    """One join of the small model."""
    per_replica: dict[int, dict[str, Any]] = {2: {"settings": SLOW}, 3: {"settings": SLOW}}
    replicas = 3 if kind == "donor killed" else 2
    if kind == "donor killed":
        per_replica = {0: {"settings": {"dies": "giving"}}, 3: {"settings": SLOW}}
    if kind == "joiner killed":
        per_replica[2] = {"settings": SLOW | {"dies": "fetching"}}
    with cluster(directory, SCRIPT, replicas, settings=SMALL, per_replica=per_replica) as made:
        made.until(lambda: any(said["step"] >= 2 for said in made.said(1, "step")), "two steps")
        made.start_rank(replicas)
        if kind == "joiner killed":
            made.wait([2])
        if kind in ("joiner killed", "two at once"):
            made.start_rank(3)
        made.wait()
        result = made.collect()
    offences = [str(each) for each in audit(result.directory / "events").offences if not unwritten(each, result)]
    late = [rank for rank in result.survivors if rank.events("recover.join.level")]
    hashes = sorted({rank.hash for rank in result.survivors})
    contributed = sum(rank.replica in receipt["who"] for rank in late for receipt in rank.receipts.values())
    fine = hashes == [expected] and not offences and bool(late) and contributed > 0
    return dict(kind=kind, joined=[rank.replica for rank in late], killed=[r for r, rank in result.ranks.items() if rank.code],
                contributed=contributed, hashes=hashes, offences=offences, equal=fine)


def main() -> int:
    parser = argparse.ArgumentParser(description="joining a run under way")
    parser.add_argument("--joins", type=int, default=20)
    parser.add_argument("--delays", type=int, default=3)
    parser.add_argument("--linger", type=float, default=LARGE["linger"], help="seconds that a microbatch sleeps")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        directory = Path(kept)
        delays = [delay(directory, options.linger) for _ in range(options.delays)]
        expected = run(directory, SCRIPT, 1, settings=SMALL).hash
        joins = [joined(directory, KINDS[n % len(KINDS)], expected) for n in range(options.joins)]
    common.show("a fourth replica joins three", ("parameters", "median step, s", "longest while it joins", "longer by", "copy, s",
                                                 "catching up, s"),
                [[d["parameters"], d["step_s"], d["longest_s"], f"{d['delay']:.1%}", d["copy_s"], d["catching_up_s"]]
                 for d in delays])
    common.show("joins of a small model, exact", ("kind", "joins", "equal"), [
        [kind, sum(j["kind"] == kind for j in joins), sum(j["kind"] == kind and j["equal"] for j in joins)] for kind in KINDS])
    met = all(d["delay"] <= LIMIT for d in delays) and all(j["equal"] for j in joins)
    if not options.no_record:
        common.record("join", "longest delay of a survivor's step at most 20 % of one step; all joins equal", met,
                      {"large": LARGE | {"linger": options.linger}, "small": SMALL}, {"delays": delays, "joins": joins})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
