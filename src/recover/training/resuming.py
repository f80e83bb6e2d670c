"""Where a run begins: after the newest checkpoint that all of its first members can read.

Theory of operation
-------------------
* `Resume` looks into the directory once, before the run is joined, and the ranks of the replica keep what all of them can
  read: so every position offers the same.
* When the first view forms, the members tell each other what they can read (steps, and the manifest's digest: the same
  checkpoint, not just the same step) and take the newest common one. Each reads it for itself, byte for byte.
* A damaged checkpoint is passed over with a warning; if none is left, the run ends with `CheckpointDamaged`: it does not
  silently begin anew. Another run's ends it with ValueError.
* A view that breaks while it forms changes who offers: all is done again, and what is put back replaces everything that was
  put back before.
* Members also tell each other a random word each; their hash names this attempt of the run, so that an audit can tell the
  receipts of two attempts at the same steps apart.
"""
from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from recover.collectives.contract import Group
from recover.errors import CheckpointDamaged
from recover.gradients.store import GradientStore
from recover.parallel import fsdp
from recover.parallel.inner import Agreement
from recover.training import checkpoint
from recover.training.checkpoint import Checkpoints, Part
from recover.training.forming import farewell
from recover.training.managed import Managed
from recover.training.numbers import Kind, number
from recover.training.state import flatten, restore

log = logging.getLogger("recover.training")

Offer = tuple[str, list[tuple[int, str]]]
OFFERS = msgspec.msgpack.Decoder(Offer)


class Resume:
    """What this replica can begin from. All its ranks at once. `steps`: the run's, which no checkpoint may be beyond.

    Raises ValueError (another run's checkpoint), CheckpointDamaged.
    """

    def __init__(self, wanted: Checkpoints, position: int, facts: Mapping[str, Any], notes: Mapping[str, Any], inner: Agreement,
                 *, steps: int) -> None:
        self.notes = notes
        self.directory, self.position, self.steps = Path(wanted.directory), position, steps
        self.start, self.attempt, self.hash = 0, "", ""
        readable: list[tuple[int, str]] = []
        damaged: list[str] = []
        mistake = ""
        if wanted.resume:
            try:
                readable, damaged = checkpoint.offers(self.directory, position, facts)
            except ValueError as wrong:
                mistake = str(wrong)
        told = inner.agree("offers", (secrets.token_hex(4), readable, damaged, mistake))
        self.nonce: str = told[0][0]
        mistakes = [wrong for *_, wrong in told if wrong]
        if mistakes:
            raise ValueError(mistakes[0])
        self.offered = [each for each in told[0][1] if all(each in others for _, others, _, _ in told)]
        problems = list(dict.fromkeys(text for _, _, texts, _ in told for text in texts))
        if problems and not self.offered:
            raise CheckpointDamaged("there are checkpoints, but none can be read: " + "; ".join(problems) + ". Begin anew with "
                                    "resume=False, or in another directory")
        for text in problems:
            log.warning("%s; an older checkpoint is taken", text)

    def compare_notes(self, path: Path) -> None:
        """What may differ, but gives other bits or other work: said, not refused."""
        kept = checkpoint.read_manifest(path)[0].notes
        differs = [key for key in self.notes if kept.get(key) != self.notes[key]]
        if differs:
            log.warning("unlike when %s was written: %s", path, "; ".join(
                f"{key} was {kept.get(key)!r}, is {self.notes[key]!r}" for key in differs))

    def choose(self, group: Group, timeout: float) -> bool:
        """Agree with the other members where to begin. False: at step 0.

        Raises PeerLost; ValueError, the same on all, if there is nothing that all can read.
        """
        payload = msgspec.msgpack.encode((self.nonce, self.offered))
        told = {m: OFFERS.decode(part) for m, part in group.gather(number(Kind.COMPARE, 3), payload).wait().items()}
        self.attempt = hashlib.sha256("".join(word for _, (word, _) in sorted(told.items())).encode()).hexdigest()[:16]
        try:
            chosen = checkpoint.common([offered for _, (_, offered) in sorted(told.items())])
            self.start = 0 if chosen is None else chosen[0]
            if self.start > self.steps:
                raise ValueError(f"{self.directory} holds a checkpoint after {self.start} steps, and the run is to have "
                                 f"{self.steps}: ask for more steps, or choose another directory")
        except ValueError:
            farewell(group, number(Kind.COMPARE, 4), timeout)
            raise
        if group.me == min(told) and self.position == 0:
            for name in checkpoint.tidy(self.directory, self.start):
                log.warning("a checkpoint newer than the one that the run begins from is now called %s", name)
        return chosen is not None

    def load(self, managed: Managed, store: GradientStore) -> None:
        """Put back what was chosen. Raises CheckpointDamaged; ValueError if it does not fit."""
        path = self.directory / f"step-{self.start:08d}"
        part = checkpoint.load(path, self.position)
        self.compare_notes(path)
        put_back(managed, store, part, path)
        self.hash = str(part.more["hash"])
        log.info("going on from %s", path)


def taken(managed: Managed, store: GradientStore, lessons: Any, digest: str) -> Part:
    """This rank's state between two steps, sharing memory with the model. `lessons`: of step 0; `digest`: `Run.hash()`, or ""."""
    fsdp.reshard(managed.models)
    return Part(flatten(managed), {"store": store.state(), "lessons": lessons, "hash": digest})


def put_back(managed: Managed, store: GradientStore, part: Part, path: Path) -> None:
    """The other way. Raises ValueError if the state does not fit, or is another one once it is put back."""
    fsdp.reshard(managed.models)
    try:
        restore(managed, part.flat)
        store.load_state(part.more["store"])
    except (ValueError, KeyError, TypeError) as wrong:
        raise ValueError(f"{path} does not fit what is managed here: {wrong}") from None
    digest = part.more["hash"]
    if digest and managed.digest(store.state()["exponents"]) != digest:
        raise ValueError(f"{path}: put back, the state is not the one that was kept; something managed keeps a part of its state "
                         "outside of state_dict()")
    if store.learned is None and part.more["lessons"] is not None:      # kept between step 0 and step 1
        store.adopt(part.more["lessons"])
        store.release()
