"""A joiner's copy on its way here, from all givers of the view at once.

Theory of operation. One thread per giver and view asks: for the header, then for one piece after the other, whichever is
missing. When the view ends, so do the threads; what they had asked for is missing again, and the next view's threads go on.
Headers of all givers must be equal, since the copies are. `catchup.Pieces` knows what is missing; here bytes are moved.
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from recover.collectives.contract import Group
from recover.config import Timeouts
from recover.errors import Diverged, JoinRefused, PeerLost, RecoverError, WireError
from recover.protocol import catchup
from recover.training.giving import Answer, Asker, What
from recover.training.snapshot import Head, read_head

log = logging.getLogger("recover.training")


class Fetch:
    """What is asked of the givers: a copy (`begin`), and later the hash of another one (`check`)."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._news = threading.Condition()
        self._group: Group | None = None
        self._late: dict[int, bool] = {}                # giver -> it has not got this attempt's copy; not in: not asked yet
        self._givers: tuple[int, ...] = ()
        self.start = -1                                 # the step of the attempt; -1: nothing is fetched
        self.head: Head | None = None
        self.data: Tensor | None = None
        self.pieces: catchup.Pieces | None = None
        self.checked: tuple[int, str | None] | None = None      # step, and its hash; None: nobody can tell
        self.error: RecoverError | None = None
        self._encoded = b""
        self._check = -1                                # the step whose hash is wanted
        self._release: set[int] = set()                 # givers that may drop their copies

    # -- the joiner's threads ---------------------------------------------------------------------------------------
    def open(self, askers: Sequence[Asker]) -> None:
        """A new view, with these givers."""
        with self._news:
            self._group = askers[0].group if askers else None
            self._givers, self._late = tuple(asker.giver for asker in askers), {}
            self._release = set(self._givers) if self.start < 0 else set()
            if self._check >= 0:
                self.checked, self._check = (self._check, None), -1
            self._news.notify_all()
        for asker in askers:
            threading.Thread(target=self._work, args=(asker,), name=f"recover-fetch-{asker.giver}", daemon=True).start()

    def begin(self, start: int) -> None:
        """Drop what is there; fetch the copy of `start`."""
        with self._news:
            self.start, self.head, self.data, self.pieces, self._encoded = start, None, None, None, b""
            self._late, self._release = {}, set()
            self._news.notify_all()

    @property
    def whole(self) -> bool:
        with self._news:
            return self.pieces is not None and self.pieces.whole

    @property
    def failed(self) -> bool:
        """Nobody has it (any more)."""
        with self._news:
            return not (self.pieces is not None and self.pieces.whole) and all(self._late.get(giver) for giver in self._givers)

    def take(self) -> tuple[Head, Tensor]:
        """What was fetched; nobody need keep it for us any more."""
        with self._news:
            assert self.head is not None
            assert self.data is not None
            head, data = self.head, self.data
            self.start, self.head, self.data, self.pieces, self._release = -1, None, None, None, set(self._givers)
            self._news.notify_all()
            return head, data

    def check(self, step: int) -> None:
        """Ask one giver for the hash of the state in which `step` begins; see `checked`."""
        with self._news:
            self.checked, self._check = None, step
            if not self._givers:
                self.checked, self._check = (step, None), -1
            self._news.notify_all()

    # -- a giver's thread -------------------------------------------------------------------------------------------
    def _work(self, asker: Asker) -> None:
        try:
            while self._more(asker):
                pass
        except PeerLost as end:
            log.debug("giver %d gives no more: %s", asker.giver, end)
        except WireError as offence:
            self._fail(JoinRefused(str(offence)))
        except Exception as error:                      # the edge of a thread: whoever waits for it must hear of it
            log.exception("fetching from member %d failed", asker.giver)
            self._fail(JoinRefused(f"fetching failed: {error!r}"))
        with self._news:
            if self.pieces is not None:
                self.pieces.lost(asker.name)

    def _fail(self, error: RecoverError) -> None:
        with self._news:
            self.error = self.error or error
            self._news.notify_all()

    def _more(self, asker: Asker) -> bool:
        """One thing to ask, or a while of waiting for one; False: the view is over."""
        giver = asker.giver
        with self._news:
            if asker.group is not self._group or asker.group.lost is not None or self.error is not None:
                return False
            start, pieces, data = self.start, self.pieces, self.data
            first = giver == min(self._givers)
            check, release = self._check if first else -1, giver in self._release
            self._release.discard(giver)
            head = start >= 0 and giver not in self._late and not release
            piece = None
            if not (head or release) and pieces is not None and not self._late.get(giver):
                piece = pieces.ask(asker.name)
            if not (head or piece or check >= 0 or release):
                self._news.wait(self._timeouts.heartbeat)
                return True
        if release:
            asker.ask(What.RELEASE)
        elif head:
            self._take_head(asker, start)
        elif piece is not None:
            assert pieces is not None and data is not None
            self._take_piece(asker, start, pieces, data[piece[0]:piece[1]], piece[0])
        else:
            self._take_digest(asker, check)
        return True

    def _take_head(self, asker: Asker, start: int) -> None:
        answer, body = asker.ask(What.HEAD, start)
        with self._news:
            if self.start != start:
                return
            self._late[asker.giver] = answer is not Answer.HERE
            if answer is Answer.UNABLE:
                self._fail(JoinRefused(text_of(body)))
            elif answer is Answer.HERE:
                self._headed(asker.giver, bytes(body.numpy()))
            self._news.notify_all()

    def _headed(self, giver: int, encoded: bytes) -> None:
        if self.head is not None:
            if encoded != self._encoded:
                self._fail(Diverged(f"what member {giver} gives for step {self.start} is not what the others give"))
            return
        try:
            self.head, self._encoded = read_head(encoded), encoded
        except ValueError as wrong:
            self._fail(JoinRefused(str(wrong)))
            return
        self.data = torch.empty(self.head.total, dtype=torch.uint8)
        self.pieces = catchup.Pieces(self.head.total, catchup.PIECE)

    def _take_piece(self, asker: Asker, start: int, pieces: catchup.Pieces, into: Tensor, at: int) -> None:
        answer, _ = asker.ask(What.PIECE, start, into, at)
        with self._news:
            if pieces is self.pieces:
                if answer is Answer.HERE:
                    pieces.arrived(asker.name)
                else:
                    pieces.lost(asker.name)
                    self._late[asker.giver] = True
            self._news.notify_all()

    def _take_digest(self, asker: Asker, step: int) -> None:
        answer, body = asker.ask(What.DIGEST, step)
        with self._news:
            if self._check == step:
                self.checked, self._check = (step, text_of(body) if answer is Answer.HERE else None), -1


def text_of(body: Tensor) -> str:
    return bytes(body.numpy()).decode(errors="replace")
