"""`recover launch`: dead replicas start again, others join from elsewhere, all go in order. Plain scripts where they do."""
from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from test_launch import Launch, launch, until  # noqa: F401 - a fixture

from recover import events
from recover.launch.verdict import ALL_DEAD, LEFT
from recover.report.audit import audit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LIVES = """
    life = 1 + len(list(here.glob(f"life{replica}-*")))
    flag(f"life{replica}-{life}")
    def die():
        log.close()
        os.kill(os.getpid(), signal.SIGKILL)
    """


def starts(launch: Launch, replica: int) -> int:  # noqa: F811
    return len(list(launch.directory.glob(f"life{replica}-*")))


def test_a_dead_replica_starts_again_and_finishes_with_the_others(launch: Launch) -> None:  # noqa: F811
    code = launch.start(LIVES + """
    join()
    commit(life)
    if replica == 1 and life == 1:
        die()
    flag(f"joined{replica}") if replica != 1 or life == 2 else None
    [wait(f"joined{other}") for other in range(3)]
    commit(life + 1)
    """, restart=1).wait()
    assert code == 0, launch.output
    assert "replica 1 starts again in 0.5 seconds (start 1 of 1" in launch.output
    assert "replica 1 starts again: process" in launch.output
    assert "finished with 3 of 3 replicas after step 3" in launch.output
    assert starts(launch, 1) == 2
    assert launch.alive() == set()


@pytest.mark.parametrize("commits", [False, True])
def test_one_that_keeps_failing_is_left_out_unless_it_commits(launch: Launch, commits: bool) -> None:  # noqa: F811
    """With a step committed in each life it has its budget anew: the third life finishes."""
    code = launch.start(LIVES + f"""
    join()
    if replica == 1:
        commit(life, (0, 1, 2)) if {commits} or life == 1 else None
        flag("over") if life == 3 else None
        log.close()
        life == 3 or {{}}["lost"]
    commit(0, (0, 1, 2))
    wait("over" if {commits} else "given up")
    commit(1, (0, 2))
    """, restart=1, events=str(launch.directory / "events"))
    if not commits:
        until(lambda: "replica 1 is not started again: it was started again once" in launch.output, launch.output)
        launch.flag("given up").touch()
    assert launch.wait() == 0, launch.output
    assert starts(launch, 1) == (3 if commits else 2)
    if not commits:
        assert "replica 1 failed with exit code 1 (KeyError: 'lost'), started again once" in launch.output
    assert code is launch


def test_nobody_starts_again_for_nobody(launch: Launch) -> None:  # noqa: F811
    code = launch.start(LIVES + """
    join()
    commit(0)
    flag(f"joined{replica}")
    [wait(f"joined{other}") for other in range(3)]
    die()
    """, restart=5).wait()
    assert code == ALL_DEAD, launch.output
    assert "nobody is left who holds the parameters" in launch.output
    assert max(starts(launch, replica) for replica in range(3)) == 1


def test_one_that_was_told_to_go_stays_away(launch: Launch) -> None:  # noqa: F811
    code = launch.start(LIVES + """
    join()
    commit(0)
    if replica == 1:
        log.emit(events.RUN_END, status="left", message="told to go: left after step 0")
        log.close()
        flag("left")
        sys.exit(75)
    wait("left")
    """, restart=5).wait()
    assert code == 0, launch.output
    assert "replica 1 left the run" in launch.output
    assert starts(launch, 1) == 1


def test_a_replica_joins_from_another_launch(launch: Launch, tmp_path: Path) -> None:  # noqa: F811
    token = tmp_path / "secret"
    token.write_text("0" * 64)
    token.chmod(0o600)
    shared = dict(token_file=str(token), run_id="shared", replicas=2)
    launch.start("""
    join((0, 1))
    log.close()
    flag("ready")
    wait("go")
    """, max_replicas=3, **{**shared, "events": str(tmp_path / "events")})
    until(lambda: launch.flag("ready").exists())
    (address,) = {line.rpartition(" ")[2] for line in launch.output.splitlines() if "coordinator at" in line}
    (tmp_path / "guest").mkdir()
    guest = Launch(tmp_path / "guest")
    code = guest.start("""
    join((0, 1, 2))
    print(os.environ["RECOVER_COORDINATOR"], os.environ["RECOVER_REPLICAS"], replica, os.environ["RECOVER_RUN_ID"])
    """, join=address, replica=2, **shared).wait()
    launch.flag("go").touch()
    assert code == 0, guest.output
    assert f"[r2] {address} 2 2 shared" in guest.output
    assert launch.wait() == 0


EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = f"""
    import runpy
    sys.argv = ["train_gpt.py", "--steps", STEPS, "--microbatches", "6", "--batch-size", "1", "--width", "16", "--layers", "1",
                "--block", "16", "--text", __file__, "--reduction", "exact", "--hash-every", "1"]
    sys.path.insert(0, {str(EXAMPLES)!r})
    runpy.run_path({str(EXAMPLES / "train_gpt.py")!r}, run_name="__main__")
    """
REAL = dict(coordinator=[sys.executable, "-u", "-m", "recover.membership.coordinator"], failure_timeout=5.0, grace=20.0)


def pids(launch: Launch) -> dict[int, int]:  # noqa: F811
    """By what it printed at the start."""
    lines = [line.split() for line in launch.output.splitlines() if ": process " in line]
    return {int(words[2].rstrip(":")): int(words[-1]) for words in lines}


def test_sigterm_to_a_real_run_ends_all_together_with_75(launch: Launch) -> None:  # noqa: F811
    directory = launch.directory / "events"
    launch.start(TRAIN.replace("STEPS", '"100000"'), replicas=2, events=str(directory), **REAL)
    until(lambda: "step    0" in launch.output, "it trains", 80)
    launch.signal(signal.SIGTERM)
    assert launch.wait(40) == LEFT, launch.output
    assert "all replicas had to go: told to go, like all others: stopped after step" in launch.output
    assert audit(directory).ok
    ends = [entry.line.attributes for path in events.files(directory) for entry in events.read(path)
            if entry.line.event == events.RUN_END]
    assert len(ends) == 2
    assert len({end["last_step"] for end in ends}) == 1


def test_a_real_replica_starts_again_and_joins(launch: Launch) -> None:  # noqa: F811
    import os
    directory = launch.directory / "events"
    launch.start(TRAIN.replace("STEPS", '"100000"'), replicas=3, restart=1, events=str(directory), **REAL)
    until(lambda: "step    0" in launch.output, "it trains", 80)
    first = pids(launch)
    os.kill(first[1], signal.SIGKILL)
    until(lambda: pids(launch)[1] != first[1], "a second life")
    second = f"events-replica1-rank0-{pids(launch)[1]}.jsonl"

    until(lambda: (directory / second).exists() and "recover.step.receipt" in (directory / second).read_text(), "it joined", 80)
    launch.signal(signal.SIGTERM)
    assert launch.wait(40) == LEFT, launch.output
    assert audit(directory).ok
