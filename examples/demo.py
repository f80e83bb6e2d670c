"""The show: train a small GPT on real text twice, once undisturbed and once with three of four replicas killed.

The second run must end where the first did, bit for bit. The first is a single replica: it has nobody to sum with, so
its numbers owe nothing to the machinery under test. In the second, the three kills hit the three moments that differ:
while a replica computes (only its microbatches are lost), in the middle of the reduction (some buckets are summed,
others not), and between reduction and update (the sums are whole, nothing is lost).

Exit code 0 only if every survivor summed exactly its microbatches at every step, the receipts stand up to the audit,
and the hashes of weights and optimizer state are equal.
"""
from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from rich.console import Console

from recover.report.curves import plot
from recover.report.live import LiveView
from recover.report.progress import Progress, Tail, replay
from recover.report.tables import Kill, comparison, kills
from text import read_file

HERE = Path(__file__).resolve().parent
STEPS, MICROBATCHES, BATCH_SIZE, BLOCK = 40, 16, 8, 64
REPLICAS = 4
LOOK_EVERY = 0.1        # seconds between two looks at the events
LIMIT = 600.0           # seconds for one run: it takes about half a minute

# Replica 0 is the leader: it goes in the middle of a reduction. Replica 1 is the one that stays.
KILLS = (Kill(replica=2, step=8, place="compute:1"),
         Kill(replica=0, step=18, place="reduce:1"),
         Kill(replica=3, step=28, place="optimizer"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="FILE", help="what to learn (default: Python's standard library)")
    parser.add_argument("--backend", default="tcp", help="of the sums between replicas (default: tcp)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/demo"), help="where the results go")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"at least {KILLS[-1].step + 2}")
    args = parser.parse_args()
    if args.steps < KILLS[-1].step + 2:
        parser.error(f"--steps {args.steps} is too few: the last kill comes in step {KILLS[-1].step}")
    return args


def write_plan(path: Path) -> None:
    entries = [{"replica": kill.replica, "step": kill.step, "place": kill.place, "action": "kill"} for kill in KILLS]
    path.write_text(yaml.safe_dump({"faults": entries}, sort_keys=False), encoding="utf-8")


def train(name: str, folder: Path, args: argparse.Namespace, console: Console, *, replicas: int,
          plan: Path | None = None) -> Progress:
    """One run under `recover launch`, shown while it goes on; its output is in `folder`/output.txt."""
    events = folder / "events"
    events.mkdir(parents=True)
    command = [sys.executable, "-m", "recover.cli", "launch", "--replicas", str(replicas), "--events", str(events)]
    if plan is not None:
        command += ["--fault", str(plan)]
    if args.backend != "tcp":                           # the launcher makes places for MPI's processes
        command += ["--backend", args.backend]
    command += [str(HERE / "train_gpt.py"), "--reduction", "exact", "--steps", str(args.steps), "--microbatches",
                str(MICROBATCHES), "--batch-size", str(BATCH_SIZE), "--block", str(BLOCK)]
    if args.text:
        command += ["--text", str(Path(args.text).resolve())]

    progress, tail = Progress(), Tail(events)
    output = folder / "output.txt"
    with output.open("wb") as sink, \
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT) as process:
        try:
            watch(process, tail, progress, LiveView(console, name, steps=args.steps,
                                                    tokens_per_step=MICROBATCHES * BATCH_SIZE * BLOCK))
        finally:
            stop(process)
    if process.returncode != 0:
        last = "\n".join(output.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"the run `{name}` ended with code {process.returncode}; its last words ({output}):\n{last}")
    return replay(events)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher if it still runs; it ends its replicas first, and has a moment for that."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def watch(process: subprocess.Popen[bytes], tail: Tail, progress: Progress, view: LiveView) -> None:
    deadline = time.monotonic() + LIMIT
    with view:
        while True:
            ended = process.poll() is not None      # asked before the last look, so that nothing is missed
            for event in tail.read():
                progress.follow(event)
            view.show(progress)
            if ended:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run takes longer than {LIMIT:.0f} seconds: stopped")
            time.sleep(LOOK_EVERY)


def judge(folder: Path, name: str, progress: Progress, steps: int) -> list[str]:
    """What is wrong with one run: its receipts, and what the audit says."""
    from recover.report.audit import audit

    found = [f"{name}: {offence}" for offence in progress.unwhole(steps, MICROBATCHES)]
    result = audit(folder / "events")
    if not result.ok:
        found.append(f"{name}: audit: {result.offence}")
    return found


def main() -> int:
    args = parse()
    console = Console()
    if args.text:
        try:
            read_file(Path(args.text), 1)       # now, not after a launch
        except ValueError as mistake:
            console.print(f"demo: {mistake}", style="red", markup=False)
            return 2
    for old in ("failure-free", "with-kills"):
        shutil.rmtree(args.out / old, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    plan = args.out / "faults.yaml"
    write_plan(plan)

    began = time.monotonic()
    try:
        reference = train("failure-free", args.out / "failure-free", args, console, replicas=1)
        survivor = train("with kills", args.out / "with-kills", args, console, replicas=REPLICAS, plan=plan)
    except RuntimeError as failure:
        console.print(f"demo: {failure}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    plot(args.out / "curves.png", reference, survivor, KILLS)
    console.print(comparison(reference, survivor))
    console.print(kills(KILLS, survivor))

    wrong = judge(args.out / "failure-free", "failure-free", reference, args.steps)
    wrong += judge(args.out / "with-kills", "with kills", survivor, args.steps)
    wrong += [f"replica {kill.replica} was not killed" for kill in KILLS if kill.replica not in survivor.losses]
    if reference.state_hash is None or reference.state_hash != survivor.state_hash:
        wrong.append("the hashes of weights and optimizer state are not equal")
    for offence in wrong:
        console.print(f"NOT as it should be: {offence}", style="bold red", markup=False)
    if not wrong:
        console.print(f"Equal, bit for bit: {len(KILLS)} of {REPLICAS} replicas were killed, and the run ended where "
                      "the failure-free one did.", style="bold green")
    console.print(f"curves: {args.out / 'curves.png'}   receipts: recover audit {args.out / 'with-kills' / 'events'}   "
                  f"{time.monotonic() - began:.0f} s", markup=False, highlight=False, soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
