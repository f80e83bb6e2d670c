"""A second coordinator stands by: it takes over, the first never acts again, and members notice next to nothing."""
from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Cluster, cluster, run
from run_checks import healthy
from test_membership_partitions import broken, causes

from membership_kit import SOON, Process, clean, cut, formed, newer, until
from recover.launch.options import free_ports
from recover.membership.standby import ERA

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

STEPS, TIMEOUT = 30, 1.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    (tmp_path / "second").mkdir()
    port, = free_ports(1)
    first = Process(tmp_path, 3, timeout=TIMEOUT, more=("--quorum", f"127.0.0.1:{port}"))
    second = Process(tmp_path / "second", 3, timeout=TIMEOUT, more=("--standby", first.address), port=port)
    yield first, second
    first.close()
    second.close()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_it_takes_over_and_the_first_never_acts_again(pair: tuple[Process, Process], how: str) -> None:
    first, second = pair
    with formed(f"{first.address},{second.address}", 3, timeout=TIMEOUT) as members:
        for member in members:
            clean(member)
        assert members[0].stats()["incarnation"] == 0
        first.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        until(lambda: all(m.connected and m._keeper.address[1] == second.port for m in members), "all have moved", 30)
        until(lambda: members[0].stats()["members"] == (0, 1, 2), "the view stands")
        assert members[0].latest.id == (0, 1), "nobody was lost: nothing is pushed"
        if how == "frozen":
            first.signal(signal.SIGCONT)                # it finds its members gone, and makes no view
        cut(members[2])
        view = newer(members[:2], (0, 1))
        assert view.id == (ERA, 1)
        assert view.members == (0, 1)


def test_while_the_first_acts_it_lets_nobody_in(pair: tuple[Process, Process]) -> None:
    first, second = pair
    with formed(f"{second.address},{first.address}", 3, timeout=TIMEOUT) as members:
        assert members[0].latest.id == (0, 1)
        assert all(m._keeper.address[1] == first.port for m in members)


def test_without_a_majority_it_does_not_take_over(pair: tuple[Process, Process]) -> None:
    """The negative control of the rule: one of three members is not enough."""
    first, second = pair
    both = f"{first.address},{second.address}"
    with formed(both, 3, timeout=TIMEOUT) as members:
        for member in members[1:]:
            member._keeper._addresses = member._keeper._addresses[:1]
        first.kill()
        with pytest.raises(TimeoutError):
            members[0].wait_view((0, 1), 5 * TIMEOUT)
        assert not members[0].connected


# -- whole runs -----------------------------------------------------------------------------------------------------
class Pair(Cluster):
    """Two coordinators. Only the first is `coordinator`."""

    second: subprocess.Popen[bytes] | None = None
    second_host, second_inside = "127.0.0.1", ()

    def start_coordinator(self) -> None:
        self.second_port, = free_ports(1)
        self.options = ("--quorum", f"{self.second_host}:{self.second_port}")
        super().start_coordinator()
        mine = self.coordinator, self.port, self.host, self.inside
        self.options = ("--standby", super().addresses)
        self.port, self.host, self.inside = self.second_port, self.second_host, self.second_inside
        super().start_coordinator()
        self.second = self.coordinator
        self.coordinator, self.port, self.host, self.inside = mine

    @property
    def addresses(self) -> str:
        return f"{self.host}:{self.port},{self.second_host}:{self.second_port}"

    def close(self) -> None:
        super().close()
        if self.second is not None:
            self.second.kill()
            self.second.wait(SOON)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_death_after_the_coordinators(tmp_path, how):
    """The recovery waits until the second one has taken over; the first wakes up in the middle of it all."""
    alone = run(tmp_path, "run_script:train", 1, settings=dict(steps=STEPS)).hash
    with cluster(tmp_path, "run_script:train", 4, kind=Pair, settings=dict(steps=STEPS, linger=0.02),
                 failure_timeout=TIMEOUT) as made:
        made.until(lambda: len(made.said(0, "step")) > 3, "under way")
        made.coordinator.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        made.signal(1, signal.SIGKILL)
        made.until(lambda: "takes over" in made._text("coordinator.txt"), "the second takes over")
        now = len(made.said(0, "step"))
        made.until(lambda: len(made.said(0, "step")) > now + 1, "they go on")
        made.coordinator.send_signal(signal.SIGCONT)
        made.wait()
        result = made.collect()
    healthy(result, STEPS)
    assert [rank.replica for rank in result.survivors] == [0, 2, 3]
    assert result.hash == alone
    assert {tuple(receipt["members"]) for receipt in result.ranks[0].receipts.values()} == {(0, 1, 2, 3), (0, 2, 3)}
    views = {tuple(receipt["view"]) for rank in result.survivors for receipt in rank.receipts.values()}
    assert {incarnation for incarnation, _ in views} == {0, ERA}


@pytest.mark.parametrize(("here", "there", "stays"), [("01", "23", [0, 1]), ("0", "123", [1, 2, 3])])
def test_a_network_in_two_with_a_coordinator_on_each_side(tmp_path, here, there, stays):
    """Half of the members keep the first; most of them make the second act, and the first waits."""
    result = broken(tmp_path, 4, stays, lambda net: net.cut("c" + here, "d" + there), kind=Pair)
    if stays == [0, 1]:
        assert sorted(causes(result)) == [(2, "heartbeat"), (3, "heartbeat")]
        assert "takes over" not in result.coordinator
    else:
        assert "takes over" in result.coordinator
        assert "acts no more" in result.coordinator


def test_too_few_open_files_are_named(tmp_path: Path) -> None:
    process = Process(tmp_path, 1)
    process.close()
    command = ["bash", "-c", 'ulimit -n 200; exec "$@"', "bash", *process.command(0), "--replicas", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "may need 512 open files, and this process may have 200" in done.stderr
