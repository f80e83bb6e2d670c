"""The beginning of a run: models are compared, then everyone takes over the parameters of one member.

Digests of all names, shapes and dtypes are compared first, then the texts that differ. Whoever sees a difference raises,
but not before all have seen it (`farewell`): the first one's going would otherwise look like a death to the others, which
would then go on without it.
"""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from recover.collectives.contract import Group
from recover.errors import PeerLost, ReplicaBroken
from recover.parallel.inner import Agreement
from recover.training.numbers import Kind, number

log = logging.getLogger("recover.training")

PART = 4096                     # signatures compared at once
TEXT = 4096                     # bytes shown of one


def farewell(group: Group, op: int, timeout: float) -> None:
    """Close no connection before every member has come this far, or can't any more. Never fails."""
    try:
        group.gather(op, b"").wait(timeout)
    except (PeerLost, TimeoutError) as early:           # someone is past it and gone, or died: nothing that we need
        log.debug("not everyone came to operation %d: %s", op, early)


def short_digest(text: str) -> bytes:
    """8 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def compare(group: Group, script: Sequence[str], model: Sequence[str], timeout: float) -> None:
    """What scripts ask for and models must be alike. Raises ValueError that names the first difference, on every replica;
    PeerLost."""
    signatures = [*script, *model]
    for start in range(0, max(1, len(signatures)), PART):
        part, chapter = signatures[start:start + PART], start // PART
        sums = b"".join(short_digest(text) for text in (*part, str(len(signatures))))
        given = group.gather(number(Kind.COMPARE, 0, chapter), sums).wait()
        if len(set(given.values())) == 1:
            continue
        length = min(map(len, given.values())) // 8
        differs = next((n for n in range(length) if len({g[8 * n:8 * n + 8] for g in given.values()}) > 1), length)
        text = part[differs] if differs < len(part) else f"{len(model)} parameters and buffers"
        said = group.gather(number(Kind.COMPARE, 1, chapter), text.encode()[:TEXT]).wait()
        farewell(group, number(Kind.COMPARE, 2, chapter), timeout)
        texts = ", ".join(f"replica {m} has {t.decode(errors='replace')!r}" for m, t in sorted(said.items()))
        place = start + differs - len(script)
        what = "scripts differ" if place < 0 else f"models differ at parameter or buffer {place}"
        raise ValueError(f"the replicas' {what}: {texts}")


def agree(inner: Agreement, formed: bool, mistake: str) -> list[bool]:
    """Which positions of this replica have formed. ValueError, with the same text on all, if one has a mistake to tell."""
    given = inner.agree("formed", (formed, mistake))
    told = [text for _, text in given if text]
    if not told:
        return [fine for fine, _ in given]
    try:
        inner.agree("formed", (formed, mistake))        # whoever leaves before all have heard ends the others otherwise
    except ReplicaBroken as gone:
        log.debug("%s, having heard", gone)
    raise ValueError(told[0])


def take_over(group: Group, values: Sequence[Tensor], root: int) -> None:
    """Copy those of `root` into `values`, out of place: a torn copy is never used. Raises PeerLost."""
    staged = [value.clone() for value in values]
    group.broadcast(number(Kind.FORM, -1), staged, root).wait()
    if root != group.me:
        with torch.no_grad():
            for value, new in zip(values, staged, strict=True):
                value.copy_(new)
