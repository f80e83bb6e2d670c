"""Re-checks a run from its receipts alone: nothing that the run believed about itself is trusted.

Theory of operation
-------------------
Receipts are read from every event file of a directory and checked, first each file by itself, then against each other:

    format   every line is one of ours; a receipt's fields have their types (a torn last line is no offence)
    chain    every receipt follows the one before it in its file, and its digest fits: nothing altered, missing,
             inserted or reordered. Digests made with a key are checked with that key
    steps    the steps of a file have no gap, and reach the step that its `run.end` claims; whoever contributed to step
             t was still there two steps before and has a receipt of it (the last receipts of a casualty may be lost).
             A joiner's receipts begin where it caught up; it contributes only after two whole steps in the view
    I1       `who` names exactly one member for each of the B microbatches, but for those that the receipt calls skipped (the
             one lawful departure from B; `tables` counts them). A member that is gone may have contributed
             before it died, hence outside `members`; within one view nobody but its members does
    I2       `who`, divisor, loss (to the bit) and bucket checksums of a step agree over all replicas
    I5       so do the hashes of the state

A run that was resumed from a checkpoint under the same identity has several *attempts*, which may have made the same steps:
each is checked by itself. It must begin where its checkpoint ends; and where both say the hash of the state at that point,
the earlier attempt (or run) that the checkpoint came from must have said the same (I5).

Receipts are published after the fence of their step, which proves that every member has the same sums: so a casualty's
last receipt must agree with the survivors' too. Different positions of a replica hold different shards: ranks are
compared with the same rank of other replicas. Where receipts disagree, the smaller party is named; with two parties
alike, the one with the higher replica number.
"""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from recover.events import (
    RECEIPT,
    RUN_END,
    RUN_RESUMED,
    RUN_START,
    VIEW_NEW,
    BadLine,
    Line,
    Receipt,
    files,
    loss_bits,
    read,
    verify,
)

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, order=True)
class Offence:
    """What is wrong, and where: `line` counts from 1; `step` is -1 where there is none."""

    step: int
    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        step = "" if self.step < 0 else f", step {self.step}"
        return f"{self.path}, line {self.line}{step}: {self.rule}: {self.what}"


class Item(NamedTuple):
    """A receipt with its place."""

    path: Path
    number: int
    replica: int
    rank: int
    receipt: Receipt

    def offence(self, rule: str, what: str) -> Offence:
        return Offence(self.receipt.step, self.path.name, self.number, rule, what)


@dataclass
class Source:
    """What one file holds of one run."""

    path: Path
    replica: int
    rank: int
    items: list[Item] = field(default_factory=list)
    end: tuple[int, dict[str, Any]] | None = None       # line number and attributes of `run.end`
    start: tuple[int, int, str | None] | None = None    # line number of `run.resumed`, steps done then, hash of the state


@dataclass
class Run:
    """What a directory holds of one run."""

    run_id: str
    attempt: str = ""                                   # of its starts: the word of `run.resumed`
    microbatches: int | None = None                     # B, from `run.start`, else from the first receipt
    known: set[int] = field(default_factory=set)        # whoever was a member or a replica at some time
    sources: dict[Path, Source] = field(default_factory=dict)

    def items(self) -> Iterator[Item]:
        """All receipts, file by file."""
        for source in self.sources.values():
            yield from source.items


@dataclass(frozen=True)
class Result:
    """The verdict: clean without offences; the first is the one of the lowest step."""

    runs: tuple[Run, ...]
    offences: tuple[Offence, ...]

    @property
    def ok(self) -> bool:
        """No offence, and something was there to check."""
        return not self.offences

    @property
    def offence(self) -> Offence | None:
        """The first one."""
        return self.offences[0] if self.offences else None


def audit(directory: Path | str, key: bytes = b"") -> Result:
    """Check all runs of a directory. Never raises for what the files hold; FileNotFoundError without a directory."""
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory of events")
    runs: dict[str, Run] = {}
    offences: list[Offence] = []
    for path in files(directory):
        offences += _load(path, runs)
    offences += _resumed(list(runs.values()))
    for run in runs.values():
        offences += _chains(run, key)
        for check in (_contents, _steps, _witnesses, _agreement):
            offences += check(run)
    if not offences and not any(True for run in runs.values() for _ in run.items()):
        offences.append(Offence(-1, str(directory), 0, "format", "no receipt here (events-*.jsonl): nothing proves anything; is "
                                "this the directory that was given to --events?"))
    return Result(tuple(runs.values()), tuple(sorted(offences)))


# ---------------------------------------------------------------- reading

def _load(path: Path, runs: dict[str, Run]) -> list[Offence]:
    offences: list[Offence] = []
    try:
        for entry in read(path):
            line = entry.line
            if line.event == RUN_RESUMED:
                _attempt(path, line, runs)
            run = next((run for run in runs.values() if run.run_id == line.run_id and path in run.sources), None)
            run = run or runs.setdefault(line.run_id, Run(line.run_id))
            offences += _take(path, entry.number, line, run)
    except BadLine as bad:
        offences.append(Offence(-1, path.name, bad.number, "format", bad.reason))
    except OSError as error:
        offences.append(Offence(-1, path.name, 0, "format", str(error)))
    return offences


def _attempt(path: Path, line: Line, runs: dict[str, Run]) -> None:
    """What follows in this file belongs to an attempt of the run: its file is that one's from the beginning."""
    attempt = str(line.attributes.get("attempt"))
    before = runs.get(line.run_id, Run(line.run_id))
    run = runs.setdefault(f"{line.run_id} {attempt}", Run(line.run_id, attempt, before.microbatches))
    source = before.sources.pop(path, None)
    if source is not None:
        run.known.add(source.replica)
        run.sources[path] = source
    if not before.sources:
        runs.pop(line.run_id, None)


def _take(path: Path, number: int, line: Line, run: Run) -> list[Offence]:
    if line.replica is None or line.rank is None:
        return [] if line.event != RECEIPT else [Offence(-1, path.name, number, "format", "a receipt of no replica")]
    run.known.add(line.replica)
    source = run.sources.setdefault(path, Source(path, line.replica, line.rank))
    if (source.replica, source.rank) != (line.replica, line.rank):
        return [Offence(-1, path.name, number, "format", "two ranks in one file")]
    if line.event == VIEW_NEW:
        members = line.attributes.get("members")
        run.known.update(member for member in members or () if isinstance(member, int))
    elif line.event == RUN_START and isinstance(line.attributes.get("microbatches"), int):
        run.microbatches = run.microbatches or line.attributes["microbatches"]
    elif line.event == RUN_RESUMED:
        source.start = number, int(line.attributes.get("steps", 0)), line.attributes.get("state_hash")
    elif line.event == RUN_END:
        source.end = (number, line.attributes)
    elif line.event == RECEIPT:
        return _take_receipt(path, number, line, run, source)
    return []


def _take_receipt(path: Path, number: int, line: Line, run: Run, source: Source) -> list[Offence]:
    try:
        receipt = msgspec.convert(line.attributes, Receipt)
    except msgspec.ValidationError as error:
        return [Offence(-1, path.name, number, "format", f"not a receipt: {error}")]
    item = Item(path, number, source.replica, source.rank, receipt)
    source.items.append(item)
    run.known.update(receipt.members)
    if (line.step, line.view) != (receipt.step, receipt.view):
        return [item.offence("format", f"the line says step {line.step} and view {line.view}, its receipt "
                                       f"step {receipt.step} and view {receipt.view}")]
    if source.end is not None:
        return [item.offence("steps", f"a receipt after the end of the run in line {source.end[0]}")]
    return []


# ---------------------------------------------------------------- each file by itself

def _chains(run: Run, key: bytes) -> Iterator[Offence]:
    for source in run.sources.values():
        previous = ""
        for item in source.items:
            wrong = verify(item.receipt, previous, key)
            if wrong is not None:
                yield item.offence("chain", wrong)
            previous = item.receipt.digest


def _contents(run: Run) -> Iterator[Offence]:
    first = min(run.items(), key=lambda item: item.receipt.step, default=None)
    if first is None:
        return
    total = run.microbatches = run.microbatches or len(first.receipt.who)
    for source in run.sources.values():
        before: Receipt | None = None
        for item in source.items:
            yield from _content(item, total, run.known, before)
            before = item.receipt


def _content(item: Item, total: int, known: set[int], before: Receipt | None) -> Iterator[Offence]:
    receipt = item.receipt
    if list(receipt.members) != sorted(set(receipt.members)) or item.replica not in receipt.members:
        yield item.offence("I1", f"members {list(receipt.members)} must be sorted, distinct and contain replica "
                                 f"{item.replica} itself")
    if len(receipt.who) != total:
        yield item.offence("I1", f"{len(receipt.who)} contributions instead of {total}")
    same_view = before is not None and before.view == receipt.view
    skipped = set(receipt.skipped or ())
    for index, member in enumerate(receipt.who):
        if index in skipped and member != -1:
            yield item.offence("I1", f"microbatch {index} comes from {member}, but was skipped")
        if member == -1 and (index in skipped or not receipt.policy_constant):
            continue
        if member == -1:
            yield item.offence("I1", f"nobody contributed microbatch {index}")
        elif member not in known:
            yield item.offence("I1", f"microbatch {index} comes from {member}, who never was a member")
        elif same_view and member not in receipt.members:
            yield item.offence("I4", f"microbatch {index} comes from {member}, who is not in this view, "
                                     f"and the step before was committed in the same view")
    nothing = receipt.divisor == 0 and skipped == set(range(total))
    if not (math.isfinite(receipt.divisor) and receipt.divisor > 0) and not nothing:
        yield item.offence("I1", f"divisor {receipt.divisor}")
    if receipt.loss is not None and loss_bits(receipt.loss) != receipt.loss_bits:
        yield item.offence("format", f"loss {receipt.loss} and its bits {receipt.loss_bits} differ")


def _steps(run: Run) -> Iterator[Offence]:
    for source in run.sources.values():
        if source.start is not None and source.items and source.items[0].receipt.step != source.start[1]:
            yield source.items[0].offence("steps", f"the run was resumed after {source.start[1]} steps, but this is its first "
                                                   "receipt")
        for before, item in zip(source.items, source.items[1:], strict=False):
            expected = before.receipt.step + 1
            if item.receipt.step != expected:
                yield item.offence("steps", f"step {expected} should follow step {before.receipt.step} here")
        yield from _ending(source)


def _ending(source: Source) -> Iterator[Offence]:
    if source.end is None or source.end[1].get("status") != "finished":
        return
    number, attributes = source.end
    first = source.start[1] - 1 if source.start is not None and source.start[1] else None
    claimed, last = attributes.get("last_step"), source.items[-1].receipt.step if source.items else first
    if isinstance(claimed, int) and claimed != last:
        yield Offence(claimed, source.path.name, number, "steps", f"the run ended with step {claimed}, but the last "
                                                                  f"receipt here is of {last}")


# ---------------------------------------------------------------- files against each other

def _resumed(runs: Sequence[Run]) -> Iterator[Offence]:
    """I5 across a resume: the state that was put back is one that some replica had said to have, if any said so."""
    said: dict[tuple[int, int], set[str]] = defaultdict(set)
    for item in (item for run in runs for item in run.items()):
        if item.receipt.state_hash:
            said[item.receipt.step, item.rank].add(item.receipt.state_hash)
    for source in (source for run in runs for source in run.sources.values()):
        if source.start is None or source.start[2] is None:
            continue
        number, steps, digest = source.start
        known = said.get((steps - 1, source.rank), set())
        if known and digest not in known:
            yield Offence(steps - 1, source.path.name, number, "I5", f"resumed after {steps} steps with the state {digest}, but "
                                                                     f"the receipts of that step say {', '.join(sorted(known))}")


def _witnesses(run: Run) -> Iterator[Offence]:
    """Whoever contributed to step t was a member two steps before, and has a receipt of that."""
    present = {(item.receipt.step, item.replica) for item in run.items()}
    members: dict[int, set[int]] = {}
    for item in run.items():
        members.setdefault(item.receipt.step, set(item.receipt.members)).intersection_update(item.receipt.members)
    seen: dict[int, set[int]] = {}
    for item in run.items():
        seen.setdefault(item.receipt.step, set()).update(item.receipt.members)
    accused: set[tuple[int, int]] = set()
    for item in run.items():
        step = item.receipt.step - 2
        for member in set(item.receipt.who) - seen.get(step, set(item.receipt.who)) - {-1}:
            if (step, member) not in accused:
                accused.add((step, member))
                yield item.offence("steps", f"replica {member} contributed to step {step + 2}, but it was not in the view of "
                                            f"step {step} yet: a joiner can't be level so soon")
        for member in set(item.receipt.who) & members.get(step, set()):
            if (step, member) not in present and (step, member) not in accused:
                accused.add((step, member))
                yield Offence(step, item.path.name, item.number, "steps",
                              f"replica {member} contributed to step {step + 2} but has no receipt of step {step}")


Aspect = tuple[str, str, Callable[[Receipt], Any]]
ASPECTS: tuple[Aspect, ...] = (
    ("I1", "who contributed what", lambda receipt: receipt.who),
    ("I1", "what was skipped", lambda receipt: receipt.skipped or ()),
    ("I1", "the divisor", lambda receipt: receipt.divisor),
    ("I1", "whether the policy keeps the batch", lambda receipt: receipt.policy_constant),
    ("I2", "the loss", lambda receipt: receipt.loss_bits),
    ("I2", "the checksums of the buckets", lambda receipt: receipt.checksums),
    ("I5", "the hash of the state", lambda receipt: receipt.state_hash),
)


def _agreement(run: Run) -> Iterator[Offence]:
    groups: dict[tuple[int, int], list[Item]] = defaultdict(list)
    for item in run.items():
        groups[item.receipt.step, item.rank].append(item)
    for group in groups.values():
        for aspect in ASPECTS:
            yield from _compare(sorted(group, key=lambda item: item.replica), aspect)


def _compare(group: Sequence[Item], aspect: Aspect) -> Iterable[Offence]:
    rule, name, of = aspect
    values = [(item, of(item.receipt)) for item in group]
    values = [(item, value) for item, value in values if value is not None]
    if not values:
        return
    usual = Counter(value for _, value in values).most_common(1)[0][0]      # the first seen among equals
    witness = next(item for item, value in values if value == usual)
    for item, value in values:
        if value != usual:
            yield item.offence(rule, f"{name} differs from replica {witness.replica}'s "
                                     f"({witness.path.name}, line {witness.number}): {value!r} and {usual!r}")


# ---------------------------------------------------------------- for people

def tables(result: Result) -> Iterator[Table]:
    """One rich table per run: what each rank's receipts cover, and what each replica contributed by anyone's receipts.

    A casualty has no receipt of the last step that it contributed to; its peers have, so that the column adds up.
    """
    from rich.table import Table

    for run in result.runs:
        name = f"{run.run_id}, attempt {run.attempt}" if run.attempt else run.run_id
        steps = {item.receipt.step: item.receipt.who for item in run.items()}
        contributed = Counter(member for who in steps.values() for member in who)
        table = Table("replica", "rank", "receipts", "steps", "contributed", "skipped", "state", title=f"run {name}, "
                      f"{run.microbatches} microbatches per step",
                      caption=f"contributed: by all receipts, once per replica; {len(steps)} steps have "
                              f"{sum(map(len, steps.values()))} microbatches")
        for source in sorted(run.sources.values(), key=lambda source: (source.replica, source.rank)):
            table.add_row(*_row(source, str(contributed.pop(source.replica, ""))))
        yield table


def _row(source: Source, done: str) -> tuple[str, ...]:
    receipts = [item.receipt for item in source.items]
    steps = f"{receipts[0].step} to {receipts[-1].step}" if receipts else "none"
    state = next((receipt.state_hash for receipt in reversed(receipts) if receipt.state_hash), "")
    skipped = sum(len(receipt.skipped or ()) for receipt in receipts)
    return str(source.replica), str(source.rank), str(len(receipts)), steps, done, str(skipped), (state or "")[:16]
