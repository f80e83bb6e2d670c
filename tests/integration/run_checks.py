"""What must hold of every run, whatever happened to it."""
from __future__ import annotations

import signal
from collections import Counter

from harness import Rank, Result

from recover.report.audit import Offence, audit


def handed_out(rank: Rank, exact: bool = True) -> Counter[tuple[int, int]]:
    """(step, index) -> how often the script was given it; the discarded calibration of `exact` left out."""
    given = [(said["step"], said["index"]) for said in rank.all("microbatch")]
    if exact and given:
        assert given[0] == (0, 0)
        given = given[1:]
    return Counter(given)


def unwritten(offence: Offence, result: Result) -> bool:
    """The last receipts of a casualty were not on the disk yet: on a busy machine more than one of these short steps."""
    return offence.rule == "steps" and any(f"replica {rank.replica} contributed" in offence.what
                                           for rank in result.ranks.values() if rank.code == -signal.SIGKILL)


def healthy(result: Result, steps: int, exact: bool = True) -> None:
    """I1 to I5 by the receipts, nothing computed twice by anyone, nothing discarded, receipts of all steps."""
    offences = [each for each in audit(result.directory / "events").offences if not unwritten(each, result)]
    assert not offences, f"{offences[0]}\n{result.show()}"
    for rank in result.ranks.values():
        twice = {name: n for name, n in handed_out(rank, exact).items() if n > 1}
        assert not twice, f"replica {rank.replica} computed again {twice}\n{result.show()}"
    for rank in result.survivors:
        assert sorted(rank.receipts) == list(range(steps)), result.show()
        assert [said["loss"] for said in rank.all("step")] == [said["loss"] for said in result.survivors[0].all("step")]
    assert all(recovery["discarded"] == 0 for recovery in result.recoveries())


def computed(result: Result, exact: bool = True) -> Counter[tuple[int, int]]:
    """(step, index) -> how many replicas computed it."""
    total: Counter[tuple[int, int]] = Counter()
    for rank in result.ranks.values():
        total += handed_out(rank, exact)
    return total
