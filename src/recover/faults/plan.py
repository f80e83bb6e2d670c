"""Fault plans: which replica breaks where, when and how. Pure; written by hand (YAML) or drawn from a seed.

Theory of operation
-------------------
A plan is a list of entries::

    faults:
      - {replica: 2, step: 5, place: "compute:1", action: kill}
      - {replica: 1, rank: 0, step: 9, place: "reduce:1", action: kill}
      - {replica: 3, step: "*", place: redo, action: stop}          # the first time that replica 3 redoes a bucket

`place` is a point in the life of one rank. Three places take an index, written after a colon:

    compute:i     before it computes the i-th microbatch of the step on this replica, counted from 0
    backward:i    in the backward of the i-th
    reduce:k      k buckets of the step are reduced, the others are not
    complete      all buckets reduced, before the positions agree on it
    fence         the step is complete, its fence not yet posted
    optimizer     the script holds the sums, the update is not done
    between       the update is done, the next step not begun

and in a recovery (`step` is the step that is being recovered):

    exchange      before the report is sent
    recompute     before the first lost microbatch is recomputed
    redo          before the first bucket is summed again
    forward       before the first whole bucket is sent to those who lack it

`action`: `kill` (SIGKILL of itself), `stop` (SIGSTOP of itself), `hang` (the training thread sleeps), `cut` (its data
connections break, though nobody died). An entry happens once: the first time that its place is passed.
"""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

INDEXED: Final = ("compute", "backward", "reduce")
RECOVERY_PLACES: Final = ("exchange", "recompute", "redo", "forward")
PLACES: Final = (*INDEXED, "complete", "fence", "optimizer", "between", *RECOVERY_PLACES)
ACTIONS: Final = ("kill", "stop", "hang", "cut")
DRAWN: Final = ("compute:0", "backward:0", "reduce:0", "reduce:1", "complete", "fence", "optimizer", "between")
MAX_FAULTS: Final = 10_000
MAX_TEXT: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry. `number` is its place in the plan, from 1; `step` None stands for "*"; `index` belongs to `place`."""

    number: int
    replica: int
    rank: int
    step: int | None
    place: str
    index: int | None
    action: str

    def __str__(self) -> str:
        where = self.place if self.index is None else f"{self.place}:{self.index}"
        step = "the first time" if self.step is None else f"step {self.step}"
        return f"entry {self.number} (replica {self.replica}, rank {self.rank}, {step}, {where}, {self.action})"


@dataclass(frozen=True)
class FaultPlan:
    """All entries of a run."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """From YAML. ValueError names the entry and what is wrong with it."""
        if len(text) > MAX_TEXT:
            raise ValueError(f"the fault plan is longer than {MAX_TEXT} characters")
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"the fault plan is not YAML: {error}") from None
        if isinstance(document, dict):
            if set(document) != {"faults"}:
                raise ValueError(f"a fault plan has one key, `faults`, not {sorted(map(str, document))}")
            document = document["faults"]
        if document is None:
            document = []
        if not isinstance(document, list):
            raise ValueError("a fault plan is a list of entries such as "
                             "{replica: 1, step: 5, place: fence, action: kill}")
        if len(document) > MAX_FAULTS:
            raise ValueError(f"a fault plan has at most {MAX_FAULTS} entries, not {len(document)}")
        return cls(tuple(_entry(number, entry) for number, entry in enumerate(document, start=1)))

    @classmethod
    def load(cls, path: Path | str) -> FaultPlan:
        """From a file. ValueError names the file, and the entry."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"can't read the fault plan {path}: {error}") from None
        try:
            return cls.parse(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def draw(cls, seed: int, replicas: int, steps: int, n: int, places: Sequence[str] = DRAWN) -> FaultPlan:
        """`n` kills of different replicas at places that every run of at least two buckets passes; a pure function.

        Never all replicas. The steps are distinct and leave the first and the last step alone when there is room.
        """
        if not 0 <= n < replicas:
            raise ValueError(f"{n} kills need more than {n} replicas to leave one alive, not {replicas}")
        low, high = (1, steps - 1) if steps - 2 >= n else (0, steps)
        if high - low < n:
            raise ValueError(f"{n} kills at different steps need at least {n} steps, not {steps}")
        rng = random.Random(f"recover faults {seed}")
        victims, at = rng.sample(range(replicas), n), sorted(rng.sample(range(low, high), n))
        entries = [{"replica": replica, "step": step, "place": rng.choice(places), "action": "kill"}
                   for replica, step in zip(victims, at, strict=True)]
        return cls(tuple(_entry(number, entry) for number, entry in enumerate(entries, start=1)))

    def dump(self) -> str:
        """As YAML that `parse` reads back."""
        entries: list[dict[str, Any]] = []
        for fault in self.faults:
            entry = asdict(fault)
            number, index = entry.pop("number"), entry.pop("index")
            assert number == len(entries) + 1
            entry["step"] = "*" if fault.step is None else fault.step
            entry["place"] = fault.place if index is None else f"{fault.place}:{index}"
            entries.append(entry)
        return str(yaml.safe_dump({"faults": entries}, sort_keys=False))

    def for_rank(self, replica: int, rank: int) -> tuple[Fault, ...]:
        """The entries of one rank."""
        return tuple(fault for fault in self.faults if (fault.replica, fault.rank) == (replica, rank))

    def check(self, replicas: int, ranks_per_replica: int) -> None:
        """ValueError for an entry that no rank of such a run could ever meet."""
        for fault in self.faults:
            if fault.replica >= replicas:
                raise ValueError(f"fault plan, {fault}: the run has only replicas 0 to {replicas - 1}")
            if fault.rank >= ranks_per_replica:
                raise ValueError(f"fault plan, {fault}: a replica has only ranks 0 to {ranks_per_replica - 1}")


def _entry(number: int, entry: object) -> Fault:
    where = f"entry {number} of the fault plan"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping such as {{replica: 1, step: 5, place: fence, action: kill}}, "
                         f"not {entry!r}")
    unknown = set(entry) - {"replica", "rank", "step", "place", "action"}
    missing = {"replica", "step", "place", "action"} - set(entry)
    if unknown or missing:
        said = [f"lacks {', '.join(sorted(missing))}"] * bool(missing)
        said += [f"has the unknown {', '.join(sorted(map(str, unknown)))}"] * bool(unknown)
        raise ValueError(f"{where} {' and '.join(said)}: {entry!r}")
    place, index = _place(where, entry["place"])
    if entry["action"] not in ACTIONS:
        raise ValueError(f"{where}: action must be one of {', '.join(ACTIONS)}, not {entry['action']!r}")
    step = None if entry["step"] == "*" else _count(where, "step", entry["step"])
    return Fault(number=number, replica=_count(where, "replica", entry["replica"]),
                 rank=_count(where, "rank", entry.get("rank", 0)), step=step, place=place, index=index,
                 action=entry["action"])


def _count(where: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        also = ' or "*"' if name == "step" else ""
        raise ValueError(f"{where}: {name} must be a whole number from 0{also}, not {value!r}")
    return value


def _place(where: str, value: object) -> tuple[str, int | None]:
    name, colon, index = str(value).partition(":")
    if not isinstance(value, str) or name not in PLACES:
        raise ValueError(f"{where}: place must be one of {', '.join(PLACES)} (the first three with an index, as in "
                         f"compute:0), not {value!r}")
    if (name in INDEXED) != bool(colon):
        fix = f"needs an index, as in {name}:0" if name in INDEXED else "takes no index"
        raise ValueError(f"{where}: place {name} {fix}, not {value!r}")
    if colon and not (index.isascii() and index.isdigit() and len(index) <= 9):
        raise ValueError(f"{where}: the index of place {name} must be a whole number from 0, not {index!r}")
    return name, int(index) if colon else None
