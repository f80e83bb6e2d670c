"""Who is in: the coordinator, a rank's connection to it, and what they say to each other (DESIGN 3.1).

`python -m recover.membership.coordinator` is the coordinator; `Member` is a rank's side. It imports no torch.
"""
from recover.membership.member import Member

__all__ = ["Member"]
