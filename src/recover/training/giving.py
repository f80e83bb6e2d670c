"""How a joiner gets state from the members of its view: questions and answers over the group that both are in.

Theory of operation
-------------------
* The transfer has no connections of its own: it uses those of the view, with their handshake, signs of life and limits. So
  whatever ends it is a change of view, and after that it goes on in the new one, from where it was.
* A joiner asks, one question after the other per giver: a question is four numbers, an answer a status and a length, then
  that many bytes. A length that was not to be expected is an offence. Nothing is ever unpickled.
* Gradients go ahead: a piece is short, and one giver sends one at a time.
* A giver (`Giver`) serves every joiner on a thread of its own, which ends with the view. It keeps a copy of the state for
  a step that a joiner names beforehand. The copy is made by the training thread when that step begins (`at`), which is all
  that training sees of it; making room for it before, hashing and sending happen on the side. At most one copy per joiner exists.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recover import events
from recover.collectives.contract import Group
from recover.config import Timeouts
from recover.errors import PeerLost, WireError
from recover.training.numbers import Kind, number
from recover.training.snapshot import MAX_HEAD, Snapshot

if TYPE_CHECKING:
    from recover.training.joining import Hands

log = logging.getLogger("recover.training")
TEXT = 4096                     # bytes of a reason
TOUCH = 1 << 20                 # bytes of memory that are made ready in one go


class What(IntEnum):
    """What a joiner asks for. `step` names the copy: the state in which that step begins."""

    WELCOME = 0                 # names and shapes of the model, and what step 0 taught
    HEAD = 1                    # keep the copy of `step` for me; its header
    PIECE = 2                   # bytes [start, end) of it
    DIGEST = 3                  # the hash of the copy of `step`
    RELEASE = 4                 # I need no copy any more


class Answer(IntEnum):
    """How a question was answered."""

    HERE = 0
    LATE = 1                    # that step began already, or the copy is gone
    UNABLE = 2                  # the state can't travel; the bytes say why


LIMITS = {What.WELCOME: MAX_HEAD, What.HEAD: MAX_HEAD, What.DIGEST: 64, What.RELEASE: 0}


class Asker:
    """The joiner's side towards one giver, in one view. One question at a time."""

    def __init__(self, group: Group, giver: int) -> None:
        self.group, self.giver, self._count = group, giver, 0
        self.name = group.view, giver

    def ask(self, what: What, step: int = 0, into: Tensor | None = None, start: int = 0) -> tuple[Answer, Tensor]:
        """The answer and its bytes (uint8). `into`: where a PIECE from `start` belongs, which is how long it is.

        Waits as long as the giver needs. Raises PeerLost, and WireError for an answer that no giver would send.
        """
        n, group = self._count, self.group
        self._count += 1
        length = 0 if into is None else into.numel()
        question = torch.tensor([what, step, start, start + length], dtype=torch.int64)
        group.send(number(Kind.ASK, n), [question], self.giver)
        said = torch.zeros(2, dtype=torch.int64)
        group.receive(number(Kind.ANSWER, n), [said], self.giver).wait()
        status, size = (int(value) for value in said.tolist())
        if status not in list(Answer) or size < 0:
            raise WireError(f"member {self.giver} answered {status} with {size} bytes")
        answer = Answer(status)
        limit = {Answer.HERE: length if into is not None else LIMITS[what], Answer.LATE: 0, Answer.UNABLE: TEXT}[answer]
        if size > limit or (answer is Answer.HERE and into is not None and size != length):
            raise WireError(f"member {self.giver} answered with {size} bytes where {limit} were to be expected")
        body = into if into is not None and answer is Answer.HERE else torch.empty(size, dtype=torch.uint8)
        if size:
            group.receive(number(Kind.BODY, n), [body], self.giver).wait()
        return answer, body


class Giver:
    """The other side: `hands` copy the state in which a step begins, `welcome` says what a joiner must know first."""

    def __init__(self, hands: Callable[[], Hands | None], welcome: Callable[[], bytes], timeouts: Timeouts,
                 record: events.Log) -> None:
        self._hands, self._welcome, self._timeouts, self._record = hands, welcome, timeouts, record
        self._news = threading.Condition()
        self._reached = -1                              # the newest step that began here
        self._wanted: dict[int, int] = {}               # joiner -> the step whose copy it wants
        self._room: Tensor | None = None                # memory that was made ready for the next copy
        self._making = False                            # it is being made ready
        self._copies: dict[int, Snapshot | str] = {}    # step -> its copy, or why there can be none

    # -- training thread --------------------------------------------------------------------------------------------
    def at(self, step: int) -> None:
        """`step` begins: make the copy that a joiner wants of it."""
        with self._news:
            if step not in self._wanted.values() or self._room is None:
                self._reached = step                    # a joiner that wants it is told to name a later one
                return
            room, self._room = self._room, None
        since, hands = time.monotonic(), self._hands()
        assert hands is not None
        made: Snapshot | str
        try:
            made = hands.take(step, room)
        except ValueError as reason:
            made = str(reason)
            log.error("no joiner can be given this run's state: %s", reason)
        took = time.monotonic() - since
        with self._news:
            self._copies[step], self._reached = made, step
            self._tidy()
            self._news.notify_all()
        size = made.data.numel() if isinstance(made, Snapshot) else 0
        self._record.emit(COPIED, step=step, seconds=took, bytes=size, joiners=sorted(self._wanted))

    def open(self, group: Group, joiners: Iterable[int]) -> None:
        """A view stands, with these members that may need something."""
        joiners = set(joiners)
        with self._news:
            self._wanted = {joiner: step for joiner, step in self._wanted.items() if joiner in joiners}
            self._tidy()
        for joiner in sorted(joiners):
            threading.Thread(target=self._serve, args=(group, joiner), name=f"recover-give-{joiner}", daemon=True).start()

    # -- a joiner's thread ------------------------------------------------------------------------------------------
    def _serve(self, group: Group, joiner: int) -> None:
        n = 0
        try:
            while True:
                question = torch.zeros(4, dtype=torch.int64)
                group.receive(number(Kind.ASK, n), [question], joiner).wait()
                answer, body = self._tried(group, joiner, [int(value) for value in question.tolist()])
                group.send(number(Kind.ANSWER, n), [torch.tensor([answer, body.numel()], dtype=torch.int64)], joiner)
                if body.numel():
                    group.send(number(Kind.BODY, n), [body], joiner).wait()
                n += 1
        except PeerLost as end:
            log.debug("no more questions of joiner %d: %s", joiner, end)

    def _tried(self, group: Group, joiner: int, question: list[int]) -> tuple[Answer, Tensor]:
        """Like `_answer`; whatever fails here is said to the joiner. It would wait for the answer, and all others for it."""
        try:
            return self._answer(group, joiner, question)
        except PeerLost:
            raise
        except Exception as error:                      # the edge of a thread: training goes on without it
            log.exception("question %s of joiner %d failed", question, joiner)
            return Answer.UNABLE, as_bytes(f"a giver failed: {error!r}".encode()[:TEXT])

    def _answer(self, group: Group, joiner: int, question: list[int]) -> tuple[Answer, Tensor]:
        what, step, start, end = question
        if what == What.WELCOME:
            return Answer.HERE, as_bytes(self._welcome())
        if what == What.RELEASE:
            with self._news:
                self._wanted.pop(joiner, None)
                self._tidy()
            return Answer.HERE, as_bytes(b"")
        copy = self._await(group, joiner, step)
        if copy is None:
            return Answer.LATE, as_bytes(b"")
        if isinstance(copy, str):
            return Answer.UNABLE, as_bytes(copy.encode()[:TEXT])
        if what == What.HEAD:
            return Answer.HERE, as_bytes(copy.head)
        if what == What.DIGEST:
            return Answer.HERE, as_bytes(copy.digest().encode())
        if what == What.PIECE and 0 <= start < end <= copy.data.numel():
            return Answer.HERE, copy.data[start:end]
        return Answer.UNABLE, as_bytes(f"nobody asks that: {question}".encode())

    def _await(self, group: Group, joiner: int, step: int) -> Snapshot | str | None:
        """The copy of `step`, once that has begun; None if it is too late for it. Raises PeerLost when the view is over."""
        with self._news:
            self._wanted[joiner] = step
            self._tidy()
            make = not self._making and self._room is None and step > self._reached
            self._making = self._making or make
        if make:
            self._make_room()
        with self._news:
            while step not in self._copies:
                if step <= self._reached:
                    return None
                if group.lost is not None:
                    raise PeerLost(group.lost.reason, group.lost.peer)
                self._news.wait(self._timeouts.heartbeat)
            return self._copies[step]

    def _make_room(self) -> None:
        """Memory for a copy, touched bit by bit, half of the time: training wants the processor and the memory, too."""
        hands = self._hands()
        assert hands is not None
        room = torch.empty(0, dtype=torch.uint8)        # too small: the copy makes its own
        try:
            room = torch.empty(hands.size(), dtype=torch.uint8)
            for start in range(0, room.numel(), TOUCH):
                since = time.monotonic()
                room[start:start + TOUCH].zero_()
                time.sleep(time.monotonic() - since)
        except RuntimeError as trouble:                 # no memory, or the training thread changed a dict while we looked
            log.warning("no room is made ready for a joiner's copy: %s", trouble)
        finally:
            with self._news:
                self._room, self._making = room, False

    def _tidy(self) -> None:
        """(Locked.) Copies that nobody wants any more."""
        wanted = set(self._wanted.values())
        for step in self._copies.keys() - wanted:
            del self._copies[step]
        if not wanted:
            self._room = None


COPIED = "recover.join.copied"


def as_bytes(data: bytes) -> Tensor:
    """[len] uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
