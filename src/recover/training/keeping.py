"""A run's checkpoints, as the run sees them: what is compared at a resume, and what happens between two steps."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recover import events
from recover.training.checkpoint import Checkpoints
from recover.training.engine import Engine
from recover.training.forming import farewell
from recover.training.numbers import Kind, number
from recover.training.resuming import Resume, taken
from recover.training.saving import Author, Saver, Training

if TYPE_CHECKING:
    from recover.training.run import Options, Run

CLOCK = "recover/clock"
"""The metric by which all replicas know the time: whoever computes microbatch 0 adds it."""


def facts(options: Options, mesh: dict[str, int], data: list[list[int]]) -> dict[str, Any]:
    """What a run must have in common with the one that wrote a checkpoint; JSON values. `data`: length and batch size of each
    data set."""
    return dict(microbatches=options.microbatches, seed=options.seed, reduction=options.reduction, nonfinite=options.nonfinite,
                buffers=options.buffers, bucket_bytes=options.bucket_bytes, first_bucket_bytes=options.first_bucket_bytes,
                mesh=mesh, data=data, skip=sorted(map(list, options.skip)))


class Keeping:
    """Made by `run.steps`, on all ranks of a replica at once. Raises ValueError, CheckpointDamaged."""

    def __init__(self, run: Run, wanted: Checkpoints, engine: Engine, steps: int) -> None:
        self.run, self.engine, self.wanted = run, engine, wanted
        mine = facts(run.options, dict(run.place.axes), run.data_sets)
        notes = {key: value for key, value in run.options.facts(run.backend_name).items() if key not in mine}
        self.resume = engine.resume = Resume(wanted, run.place.rank, mine, notes, run.inner, steps=steps)
        author = Author(run.replica, run.place.rank, run.place.ranks, self.resume.nonce, run.run_id, mine, notes)
        training = Training(engine.agreed, engine.activity.pause)
        self.saver = Saver(wanted, author, training, run.record, last=steps, patience=run.timeouts.coordinator)
        engine.on_fenced = self.saver.fenced
        self._announced = False

    def announce(self) -> None:
        """(A step begins, or none is left.) The run's events say once that it was resumed, before its first receipt."""
        if self._announced or self.engine.joiner is not None:           # a joiner resumed nothing
            return
        self._announced = True
        resume, position = self.resume, self.engine.position
        self.run.record.emit(events.RUN_RESUMED, view=position.view.id, step=resume.start, steps=resume.start,
                             attempt=resume.attempt, state_hash=resume.hash or None)

    def writers(self, step: int) -> Sequence[int]:
        """Who takes turns: members that hold the parameters, by the vector for `step`, which is the same on all."""
        position = self.engine.position
        return position.givers(step) or position.view.members

    def ended(self, step: int) -> None:
        """The whole job ends before `step`, alike on all: one more checkpoint, by the lowest replica."""
        self.saver.settle()
        if step <= self.resume.start or self.run.replica != min(self.writers(step)):
            return
        self.saver.begin(step, lambda: taken(self.run.managed, self.run.sums.store, self.engine.lessons, ""))
        self.saver.fenced(step - 1)
        if all(self.engine.agreed("fenced", True)):
            self.saver.settle()

    def finish(self, timeout: float) -> None:
        """The end of the run. Nobody goes before the last checkpoint is written: a launcher ends whoever is late."""
        self.announce()
        self.saver.settle()
        group = self.engine.group
        if group is not None:
            with self.engine.activity.waiting():
                farewell(group, number(Kind.PART, 3), timeout)

    def updated(self, step: int, digest: str, clock: float | None) -> None:
        """The update of `step` is done; `digest`: the hash after it, or "". """
        def take() -> Any:
            return taken(self.run.managed, self.run.sums.store, self.engine.lessons, digest)

        if self.saver.between(step + 1, self.writers(step), take, clock):
            passed = self.engine.passes(step)
            if passed:
                self.saver.fenced(step)
            if all(self.engine.agreed("fenced", passed)):     # else it gets its name once a recovery is over
                self.saver.settle()
