"""When a checkpoint is written, by whom, and how without holding up training.

Theory of operation
-------------------
* Every n steps (or minutes) one replica writes, the members of the view in turn: `turn`, a pure function of the number of
  steps and the view. Nothing is said about it. Around a failure two may think it is their turn, or nobody: `checkpoint`
  deals with the one, the next turn with the other.
* The copy is taken by the training thread between two steps; a thread of its own writes it. At most one is under way: one
  that is due meanwhile is skipped and counted. What fails is logged and counted; it never ends the run.
* A casualty may have committed other bits (`fast`), so a checkpoint gets its name only after the fence of its last step:
  then all replicas have the same. The thread waits for its *release*. A replica of one rank releases it when the
  fence has passed. In one of several ranks each position writes its own file, and between steps the positions tell each other how
  far they are: once all have written and passed the fence, position 0 writes the manifest and renames. If one failed, all
  drop theirs.
* `settle` waits for what is under way: at the end, and for `run.save()`, which asks for one after the step at hand, by the
  lowest replica.
"""
from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recover import events
from recover.training.checkpoint import WRITE_ERRORS, Checkpoints, Draft, File, Manifest, Part, past, retain
from recover.training.state import copied

log = logging.getLogger("recover.training")

Taken = Callable[[], Part]
"""Takes the state apart; its tensors share memory with the model."""


def turn(number: int, members: Sequence[int]) -> int:
    """The member that writes the checkpoint of this number."""
    ordered = sorted(members)
    return ordered[number % len(ordered)]


class Rhythm:
    """When one is due. Pure but for remembering the clock's last reading."""

    def __init__(self, every: int | None, minutes: float | None, last: int) -> None:
        self.every, self.seconds, self.last = every, None if minutes is None else minutes * 60, last
        self._beat: int | None = None

    def due(self, steps: int, clock: float | None = None) -> int | None:
        """The number of the checkpoint that is due after `steps` steps, or None. `clock`: seconds, the same on all replicas."""
        beat = None if clock is None or self.seconds is None else math.floor(clock / self.seconds)
        by_time = beat is not None and self._beat not in (None, beat)
        self._beat = self._beat if beat is None else beat
        if self.every is not None and (steps % self.every == 0 or by_time or steps == self.last):
            return steps // self.every
        return beat or steps if by_time or steps == self.last else None


@dataclass
class Job:
    """One checkpoint under way, at this rank. Its thread sets `written`; whoever finds a `problem` sets that."""

    steps: int
    draft: Draft
    fenced: bool = False
    written: File | None = None
    problem: str = ""
    files: list[File] = field(default_factory=list)                         # of all positions, once they have told
    ready: threading.Event = field(default_factory=threading.Event)         # written, or not possible
    released: threading.Event = field(default_factory=threading.Event)      # it may have its name, or has a problem
    over: threading.Event = field(default_factory=threading.Event)

    def told(self) -> tuple[str, str, int]:
        """What the positions tell each other: "failed", "busy", or "written" with the file's digest and length."""
        if self.problem:
            return "failed", "", 0
        if self.written is None or not self.fenced:
            return "busy", "", 0
        return "written", self.written.sha256, self.written.bytes

    def give_up(self, why: str) -> None:
        self.problem = self.problem or why
        self.released.set()


@dataclass(frozen=True)
class Author:
    """Who writes, and what every manifest says. `nonce`: of this start of the replica, the same on its ranks."""

    replica: int
    position: int
    ranks: int
    nonce: str
    run_id: str
    facts: Mapping[str, Any]
    notes: Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """What the training thread lends: `agree` with the replica's other ranks, and `pause`, inside which the run's watchers know
    that this takes its time (see `membership.activity`)."""

    agree: Callable[[str, Any], list[Any]]
    pause: Callable[[str, float | None], AbstractContextManager[None]]


class Saver:
    """Checkpoints of one rank; `last`: the run's steps. Called by the training thread. `patience`: seconds that `settle`
    waits for a disk."""

    def __init__(self, wanted: Checkpoints, author: Author, training: Training, record: events.Log, *, last: int,
                 patience: float) -> None:
        self.wanted, self.author, self.training, self.record, self.patience = wanted, author, training, record, patience
        self.directory, self.alone = Path(wanted.directory), author.ranks == 1
        self.rhythm = Rhythm(wanted.every, wanted.minutes, last)
        self.job: Job | None = None
        self.asked = False
        self.saved = self.failed = self.skipped = 0
        self._newest: Job | None = None

    # -- the training thread ----------------------------------------------------------------------------------------
    def between(self, steps: int, members: Sequence[int], take: Taken, clock: float | None = None) -> bool:
        """`steps` steps are done. Copies the state if a checkpoint is due, by us. True: the script asked for it: `settle`."""
        number, asked, self.asked = self.rhythm.due(steps, clock), self.asked, False
        self.poll()
        if asked or steps == self.rhythm.last:          # these are not skipped because another one is under way
            self.settle()
        writer = min(members) if asked else None if number is None else turn(number, members)
        if writer != self.author.replica:
            return False
        if self.job is not None:
            self.skipped += 1
            log.warning("no checkpoint after step %d: the one after step %d is not written yet (%d skipped so far)", steps - 1,
                        self.job.steps - 1, self.skipped)
            return False
        self.begin(steps, take)
        return asked

    def begin(self, steps: int, take: Taken) -> None:
        """Copy the state, and start to write it."""
        since = time.monotonic()
        job = Job(steps, Draft(self.directory, steps, f"r{self.author.replica}-{self.author.nonce}"))
        part: Part | None = None
        try:
            with self.training.pause("copying a checkpoint", None):
                part = take()
                part = Part(copied(part.flat), part.more)
        except (ValueError, RuntimeError, MemoryError) as error:        # what can't be kept, or no room for a copy
            job.problem, part = f"the state can't be copied: {error}", None
        took, before = time.monotonic() - since, self._newest
        self.job = self._newest = job
        threading.Thread(target=self._run, args=(job, part, took, before), name="recover-checkpoint", daemon=True).start()

    def fenced(self, step: int) -> None:
        """The fence of `step` has passed."""
        job = self.job
        if job is not None and step >= job.steps - 1:
            job.fenced = True
            if self.alone:
                job.released.set()

    def poll(self) -> None:
        """Let go of a checkpoint that is over. In a replica of several ranks, all positions at the same place: release it
        when all have written it, drop it when one failed."""
        job = self.job
        if job is None:
            return
        if self.alone:
            self.job = None if job.over.is_set() else job
            return
        told = self.training.agree("saved", job.told())
        words = {word for word, _, _ in told}
        if "failed" in words:
            job.give_up("another rank of the replica could not write its part")
        elif words == {"written"}:
            job.files = [File(digest, length) for _, digest, length in told]
            job.released.set()
        if job.released.is_set():
            self.job = None

    def settle(self) -> None:
        """Wait until what is under way has its name, or failed. All positions at the same place."""
        if self._newest is not None and not self._newest.over.is_set():
            with self.training.pause("writing a checkpoint", 2 * self.patience):
                self._settle()
        self.job = None

    def _settle(self) -> None:
        job, until = self.job, time.monotonic() + self.patience
        if job is not None:
            if not job.ready.wait(self.patience):
                job.give_up(f"not written within {self.patience:g} s")
            elif not job.fenced:
                job.give_up("the run ended before all replicas had its last step")
            self.poll()
        if self._newest is not None and not self._newest.over.wait(max(0.0, until - time.monotonic())):
            log.error("a checkpoint is still not on the disk after %g s: not waiting any more", self.patience)

    def drop(self, why: str) -> None:
        """The replica ends, not in order: nothing comes of what is under way, unless it is all but done."""
        if self.job is not None:
            if not self.job.released.is_set():
                self.job.give_up(why)
            self.job.over.wait(1.0 if self.job.ready.is_set() else 0)
            self.job = None

    # -- its own thread ---------------------------------------------------------------------------------------------
    def _run(self, job: Job, part: Part | None, copying: float, before: Job | None) -> None:
        if before is not None:
            before.over.wait()
        since = time.monotonic()
        try:
            job.written = None if part is None else job.draft.write(self.author.position, part)
        except WRITE_ERRORS as error:
            job.problem = f"it can't be written: {error}"
        took, part = time.monotonic() - since, None
        job.ready.set()
        if not (self.alone and job.problem):                    # whoever is alone has nobody to tell
            job.released.wait()
        if not job.problem and self.author.position == 0:
            self._publish(job, copying, took)
        if job.problem:
            job.draft.drop()
            self.failed += 1
            log.error("no checkpoint after step %d: %s (%d failed so far)", job.steps - 1, job.problem, self.failed)
            self.record.emit(events.CHECKPOINT_FAILED, severity="ERROR", step=job.steps - 1, steps=job.steps,
                             message=job.problem)
        job.over.set()

    def _publish(self, job: Job, copying: float, writing: float) -> None:
        assert job.written is not None
        author, files = self.author, job.files or [job.written]
        manifest = Manifest(steps=job.steps, run_id=author.run_id, replica=author.replica, facts=past(author.facts, job.steps),
                            notes=dict(author.notes), files=files)
        try:
            first = job.draft.publish(manifest)
            retain(self.directory, self.wanted.keep)
        except OSError as error:
            job.problem = f"it can't be given its name: {error}"
            return
        self.saved += 1
        log.info("checkpoint after step %d: %s", job.steps - 1, "written" if first else "another replica was first")
        self.record.emit(events.CHECKPOINT_SAVED, step=job.steps - 1, steps=job.steps, bytes=sum(f.bytes for f in files),
                         copy=copying, write=writing, first=first)
