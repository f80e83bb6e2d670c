"""How two ranks prove to each other that they belong to the same run, as bytes.

    caller   -> HELLO      run, view, position, who calls whom, a nonce
    answerer -> CHALLENGE  a nonce of its own, and its proof
    caller   -> PROOF
    answerer -> WELCOME    once it is forming that view itself: until then the connection waits

A proof is HMAC-SHA256 under the run's token over the role and all bytes that both have seen, both nonces among them:
it is worth nothing in another connection, direction, view or run. What flows afterwards is neither encrypted nor
signed: the network between the ranks is trusted, as it is for every collectives library.

Both sides are generators: they yield (bytes to send, number of bytes they want next) and return their result. They
raise WireError for whatever no member of the run would say.
"""
from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Generator
from typing import NamedTuple

from recover.errors import WireError
from recover.protocol.messages import ViewId

_PREFIX = struct.Struct("<8sH")
_HELLO = struct.Struct("<qqIqq32s")
MAGIC = b"RECOVER1"
NONCE = PROOF = 32
RUN_LIMIT = 200                 # bytes of a run's name

Talk = Generator[tuple[bytes, int], bytes, "Hello"]


class Hello(NamedTuple):
    """What the caller says first; `welcome` is what the answerer says last."""

    run_id: str
    view: ViewId
    position: int
    caller: int
    answerer: int
    welcome: bytes = b""


def _prove(token: bytes, role: bytes, seen: bytes) -> bytes:
    return hmac.digest(token, role + b"\0" + seen, "sha256")


def _encode(hello: Hello) -> bytes:
    run = hello.run_id.encode()
    if len(run) > RUN_LIMIT:
        raise ValueError(f"the run's name has {len(run)} bytes, at most {RUN_LIMIT} are allowed")
    body = _HELLO.pack(*hello.view, hello.position, hello.caller, hello.answerer, secrets.token_bytes(NONCE)) + run
    return _PREFIX.pack(MAGIC, len(body)) + body


def call(token: bytes, hello: Hello) -> Talk:
    """The side that connects."""
    said = _encode(hello)
    answer = yield said, NONCE + PROOF
    seen = said + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _prove(token, b"answer", seen)):
        raise WireError("could not prove that it belongs to this run (another token?)")
    welcome = yield _prove(token, b"call", seen), PROOF
    if not hmac.compare_digest(welcome, _prove(token, b"welcome", seen)):
        raise WireError("could not prove that it belongs to this run")
    return hello


def answer(token: bytes, check: Callable[[Hello], None]) -> Talk:
    """The side that was connected to. `check` raises WireError for a hello that does not concern this rank."""
    prefix = yield b"", _PREFIX.size
    magic, size = _PREFIX.unpack(prefix)
    if magic != MAGIC or not _HELLO.size <= size <= _HELLO.size + RUN_LIMIT:
        raise WireError("not a greeting of a rank")
    body = yield b"", size
    incarnation, counter, position, caller, answerer, _ = _HELLO.unpack_from(body)
    hello = Hello(body[_HELLO.size:].decode(errors="replace"), (incarnation, counter), position, caller, answerer)
    check(hello)
    nonce = secrets.token_bytes(NONCE)
    seen = prefix + body + nonce
    proof = yield nonce + _prove(token, b"answer", seen), PROOF
    if not hmac.compare_digest(proof, _prove(token, b"call", seen)):
        raise WireError("could not prove that it belongs to this run (another token?)")
    return hello._replace(welcome=_prove(token, b"welcome", seen))
