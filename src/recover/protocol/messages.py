"""What members and the coordinator say to each other, as plain typed values.

Sans-I/O: these are msgspec structs so that `membership/` can put them on the wire as they are, but nothing here knows
about sockets. A `ViewId` is (incarnation of the coordinator, counter): a coordinator that comes back with nothing
never issues a number that was used before, and two of them never act under the same number.
"""
from __future__ import annotations

import msgspec

ViewId = tuple[int, int]
NO_VIEW: ViewId = (-1, 0)

Bucket = tuple[int, int]
"""(position, index of the bucket at that position)"""


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where the data connections of one rank are accepted."""

    host: str
    port: int


Name = tuple[int, int]
"""A microbatch: (step, index)"""


class View(msgspec.Struct, frozen=True):
    """A numbered membership. `endpoints[member][position]` says where its data connections are accepted."""

    id: ViewId = NO_VIEW
    members: tuple[int, ...] = ()
    endpoints: dict[int, tuple[Endpoint, ...]] = {}
    forming: bool = False                           # the first view of the run: its members begin at step 0
    killers: tuple[Name, ...] = ()                  # microbatches at which two replicas died, as far as is known


class Pending(msgspec.Struct, frozen=True):
    """A view announced with the fence: it follows `base`, and members switch to it when all fences name it."""

    view: View
    base: ViewId


class Speed(msgspec.Struct, frozen=True, array_like=True):
    """What a member says with the fence.

    speed: 0 means no quota (not level, or leaving). pending: a view that it knows of. digest: of its state after the
    newest step that was hashed; "" if none was. All members that say one must say the same (I5).
    """

    speed: float = 0.0
    pending: Pending | None = None
    digest: str = ""


Vector = dict[int, float]
"""member -> speed; 0 means no quota"""


class Report(msgspec.Struct, frozen=True):
    """What a replica tells its peers in a recovery, through its leader (DESIGN 3.2, point 4 and "one report")."""

    step: int | None                                # None: a joiner that is still outside
    level: bool = False                             # it holds the parameters as of `step`
    leaving: bool = False
    fresh: bool = False                             # it was in no view before: if the others are formed, it is a joiner
    formed: bool = True                             # the first parameters are known to be everywhere
    owes: dict[int, frozenset[int]] = {}            # step -> microbatches owed, for `step` and the next
    shadow: dict[int, frozenset[int]] = {}          # the same of a spare: computed, but not counted unless promoted
    buckets: tuple[tuple[int, int], ...] = ()       # per position: layout (0 as registered, 1 as learned), how many
    reduced: frozenset[Bucket] = frozenset()        # buckets of `step` that are whole here
    vectors: dict[int, Vector] = {}                 # step from which it holds -> vector
    skipped: frozenset[Name] = frozenset()          # microbatches that a decision has put aside (see `decision`)
