"""Proof that both ends belong to one run, before anything else is parsed. Sans-I/O.

Theory of operation
-------------------
Three messages of fixed size, each read as bytes and compared, never decoded::

    caller  -> greeter    magic and version (8), nonce A (32)
    greeter -> caller     magic and version (8), nonce B (32), HMAC(token; "greeter", run, A, B) (32)
    caller  -> greeter    HMAC(token; "caller", run, A, B) (32), then frames

Both sides prove that they hold the token and mean the same run: a leftover of yesterday's run, a second run on the same
host, or a process that took over the coordinator's port can't meet this one. The roles are part of what is signed, so
that no proof can be reflected; fresh nonces on both sides, so that none can be replayed. The greeter proves itself
first: a caller with the wrong token learns that it is wrong, instead of being dropped silently.
What follows is neither encrypted nor signed: the network between the hosts of a run is trusted to carry bytes.
"""
from __future__ import annotations

import hmac
import os

from recover.errors import WireError

VERSION = 2
MAGIC = b"RECOVER" + bytes([VERSION])
NONCE = 32
PROOF = 32


def proof(token: bytes, run_id: str, role: bytes, caller_nonce: bytes, greeter_nonce: bytes) -> bytes:
    """What `role` shows to the other side (32 bytes)."""
    return hmac.digest(token, b"\0".join((b"recover membership", role, run_id.encode())) + caller_nonce + greeter_nonce,
                       "sha256")


def check_magic(data: bytes) -> None:
    """Raises WireError as soon as `data` can't be the beginning of our handshake."""
    seen = min(len(data), len(MAGIC))
    if data[:seen] == MAGIC[:seen]:
        return
    if seen == len(MAGIC) and data[:seen - 1] == MAGIC[:-1]:
        raise WireError(f"speaks version {data[seen - 1]} of the protocol, this is version {VERSION}")
    raise WireError(f"does not speak this protocol: {data[:seen]!r}")


class Greeter:
    """The coordinator's side. `feed` takes bytes and gives bytes to send; `passed` says that frames follow."""

    def __init__(self, token: bytes, run_id: str, nonce: bytes | None = None) -> None:
        self._token, self._run_id = token, run_id
        self._nonce = nonce or os.urandom(NONCE)
        self._caller = b""
        self._buffer = b""
        self.passed = False
        self.surplus = b""                      # bytes behind the handshake: frames already

    def feed(self, data: bytes) -> bytes:
        """Raises WireError at the first byte that a member of this run would not send."""
        assert not self.passed, "the handshake is over"
        self._buffer += data
        if not self._caller:
            return self._hello()
        if len(self._buffer) >= PROOF:
            shown, self.surplus, self._buffer = self._buffer[:PROOF], self._buffer[PROOF:], b""
            if not hmac.compare_digest(shown, proof(self._token, self._run_id, b"caller", self._caller, self._nonce)):
                raise WireError("does not prove that it belongs to this run (another token, or another run)")
            self.passed = True
        return b""

    def _hello(self) -> bytes:
        check_magic(self._buffer)
        length = len(MAGIC) + NONCE
        if len(self._buffer) > length:
            raise WireError("says more than hello before it was greeted")
        if len(self._buffer) < length:
            return b""
        self._caller, self._buffer = self._buffer[len(MAGIC):], b""
        return MAGIC + self._nonce + proof(self._token, self._run_id, b"greeter", self._caller, self._nonce)


class Caller:
    """A rank's side: send `hello`, then what `feed` gives; `passed` says that frames may be sent."""

    def __init__(self, token: bytes, run_id: str, nonce: bytes | None = None) -> None:
        self._token, self._run_id = token, run_id
        self._nonce = nonce or os.urandom(NONCE)
        self._buffer = b""
        self.passed = False
        self.surplus = b""

    @property
    def hello(self) -> bytes:
        return MAGIC + self._nonce

    def feed(self, data: bytes) -> bytes:
        """Raises WireError if whoever answers is not the coordinator of this run."""
        assert not self.passed, "the handshake is over"
        self._buffer += data
        check_magic(self._buffer)
        start, length = len(MAGIC) + NONCE, len(MAGIC) + NONCE + PROOF
        if len(self._buffer) < length:
            return b""
        theirs, shown, self.surplus = self._buffer[len(MAGIC):start], self._buffer[start:length], self._buffer[length:]
        if not hmac.compare_digest(shown, proof(self._token, self._run_id, b"greeter", self._nonce, theirs)):
            raise WireError("does not prove that it is the coordinator of this run (another token, or another run)")
        self.passed = True
        return proof(self._token, self._run_id, b"caller", self._nonce, theirs)
