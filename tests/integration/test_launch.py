"""`recover launch` with real processes: plain scripts that need no torch, and a coordinator that only listens."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recover import events
from recover.launch.verdict import ALL_DEAD, FAULT_MISSED, MEMBER_FAILED, NO_COORDINATOR, NOT_JOINED

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]
SOURCE = Path(__file__).parents[2] / "src"

COORDINATOR = """
import argparse, os, signal, socket
parser = argparse.ArgumentParser()
for name in ("listen", "token-file", "run-id", "replicas", "ranks-per-replica", "failure-timeout", "incarnation",
             "events", "port-file", "max-replicas"):
    parser.add_argument("--" + name, required=True)
args = parser.parse_args()
assert os.stat(args.token_file).st_mode & 0o777 == 0o600
assert len(open(args.token_file).read()) == 64
host, port = args.listen.rsplit(":", 1)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((host, int(port)))
server.listen()
with open(args.port_file + ".new", "w") as file:
    file.write(str(server.getsockname()[1]))
os.replace(args.port_file + ".new", args.port_file)
print("incarnation", args.incarnation, "port", server.getsockname()[1], "pid", os.getpid(), flush=True)
signal.pause()
"""

DRIVER = """
import json, sys
from pathlib import Path
from recover.launch import Options, launch
settings = json.loads(sys.argv[1])
for name in ("script", "faults", "events", "token_file"):
    if settings.get(name):
        settings[name] = Path(settings[name])
coordinator = settings.pop("coordinator")
sys.exit(launch(Options(**settings), coordinator))
"""

PRELUDE = """
import os, signal, subprocess, sys, time
replica, rank = int(os.environ["RECOVER_REPLICA"]), int(os.environ["RANK"])
here = __import__("pathlib").Path(__file__).parent
from recover import events
log = events.open_log(os.environ["RECOVER_EVENTS"], os.environ["RECOVER_RUN_ID"], replica, rank)

def join(members=(0, 1, 2)):
    log.emit(events.RUN_JOINED, view=(0, 1), members=members)

def commit(step, members=(0, 1, 2)):
    log.receipt(events.make_receipt(step=step, view=(0, 1), members=members, who=[0], divisor=1, loss=1.0))

def flag(name):
    (here / name).touch()

def wait(name):
    deadline = time.monotonic() + 40
    while not (here / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
"""


class Launch:
    """One launcher with its own directory; every process of it carries a mark in its environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[str] | None = None
        self._output = directory / "output.txt"
        (directory / "coordinator.py").write_text(COORDINATOR)
        (directory / "driver.py").write_text(DRIVER)

    def start(self, script: str, *, before: tuple[str, ...] = (), stdout: int | None = None,
              **settings: object) -> Launch:
        """Start a launch of `script`; the settings are those of `Options`."""
        path = self.directory / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(script))
        chosen = {"script": str(path), "replicas": 3, "failure_timeout": 0.1, "grace": 0.5,
                  "coordinator": [sys.executable, "-u", str(self.directory / "coordinator.py")], **settings}
        environ = {**os.environ, "PYTHONPATH": str(SOURCE), "LAUNCH_TEST": self.mark}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*before, sys.executable, str(self.directory / "driver.py"), json.dumps(chosen)], text=True,
                env=environ, stdin=subprocess.DEVNULL, stdout=output if stdout is None else stdout, stderr=output)
        return self

    def wait(self, timeout: float = 30) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def flag(self, name: str) -> Path:
        return self.directory / name

    def alive(self) -> set[int]:
        """All processes that carry our mark and are no zombies."""
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"LAUNCH_TEST={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
        return found


def until(condition: Callable[[], object], what: str = "", seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what or "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    one = Launch(tmp_path)
    yield one
    for pid in one.alive():
        os.kill(pid, signal.SIGKILL)
    if one.process is not None:
        one.process.wait(10)


def test_ranks_get_their_environment_and_their_output_a_prefix(launch: Launch) -> None:
    code = launch.start("""
        names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR RECOVER_REPLICA RECOVER_REPLICAS "
                 "OMP_NUM_THREADS RECOVER_FAILURE_TIMEOUT RECOVER_RUN_ID")
        print(*(os.environ[name] for name in names.split()))
        assert os.environ["RECOVER_COORDINATOR"].startswith("127.0.0.1:")
        print("to stderr", file=sys.stderr)
        print(f"master-{replica}", os.environ["MASTER_PORT"])
        sys.stdout.write("no line feed")
        """, replicas=2, ranks_per_replica=2, threads_per_rank=3, run_id="monday").wait()
    lines = launch.output.splitlines()
    assert code == 0, launch.output
    for replica in range(2):
        for rank in range(2):
            prefix = f"[r{replica}.{rank}] "
            assert f"{prefix}{rank} {rank} 2 2 127.0.0.1 {replica} 2 3 0.1 monday" in lines
            assert f"{prefix}to stderr" in lines
            assert f"{prefix}no line feed" in lines
    ports = {line.split("] ")[1] for line in lines if "master-" in line}
    assert len(ports) == 2
    assert launch.alive() == set()


def test_a_script_that_fails_before_joining_ends_the_run_with_a_message(launch: Launch) -> None:
    code = launch.start("""
        if replica == 1:
            sys.exit("no such text file")
        time.sleep(60)
        """).wait()
    assert code == NOT_JOINED
    assert "[r1] no such text file" in launch.output
    assert "replica 1 failed with exit code 1" in launch.output
    assert launch.alive() == set()


def test_a_killed_replica_is_no_failure_if_the_others_finish(launch: Launch) -> None:
    code = launch.start("""
        join()
        log.close()
        flag(f"joined{replica}")
        [wait(f"joined{other}") for other in range(3)]
        if replica == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        """).wait()
    assert code == 0
    assert "was killed by SIGKILL" in launch.output
    assert "finished with 2 of 3 replicas" in launch.output


def test_when_all_die_the_message_says_how_far_it_got(launch: Launch) -> None:
    code = launch.start("""
        join()
        for step in range(5 + replica):
            commit(step)
        log.close()
        flag(f"joined{replica}")
        [wait(f"joined{other}") for other in range(3)]
        os.kill(os.getpid(), signal.SIGKILL)
        """).wait()
    assert code == ALL_DEAD
    assert "all replicas are gone after step 6" in launch.output


@pytest.mark.parametrize(("last", "code"), [((0, 1, 2), MEMBER_FAILED), ((0, 1), 0)])
def test_a_failure_counts_if_the_replica_is_in_the_last_view(launch: Launch, last: tuple[int, ...], code: int) -> None:
    assert launch.start(f"""
        join()
        commit(0, {last} if replica < 2 else (0, 1, 2))
        log.close()
        flag(f"joined{{replica}}")
        [wait(f"joined{{other}}") for other in range(3)]
        sys.exit(replica == 2)
        """).wait() == code
    assert "replica 2 failed with exit code 1" in launch.output


PLAN = """
- {replica: 1, step: 3, place: "compute:0", action: kill}
- {replica: 0, step: 4, place: fence, action: hang}
"""


def test_planned_faults_are_checked_and_reported(launch: Launch) -> None:
    plan = launch.directory / "plan.yaml"
    plan.write_text(PLAN)
    script = """
        from recover.config import Environment
        from recover.faults import injector_for
        join()
        log.close()
        flag(f"joined{replica}")
        [wait(f"joined{other}") for other in range(3)]
        injector = injector_for(Environment.read(), act={"hang": lambda: print("hanging")})
        for step in range(5 if "all" in sys.argv else 4):
            injector.at("compute", step, 0)
            injector.at("fence", step)
        """
    directory = launch.directory / "events"
    assert launch.start(script, faults=str(plan), events=str(directory)).wait() == FAULT_MISSED
    assert "entry 2 (replica 0, rank 0, step 4, fence, hang)" in launch.output
    assert "entry 1" not in launch.output
    for path in launch.directory.glob("joined*"):
        path.unlink()
    assert launch.start(script, faults=str(plan), events=str(directory), arguments=["all"], run_id="second").wait() == 0
    injected = [entry.line for path in events.files(directory) for entry in events.read(path)
                if entry.line.event == events.FAULT_INJECTED and entry.line.run_id == "second"]
    assert sorted((line.attributes["number"], line.step) for line in injected) == [(1, 3), (2, 4)]
    assert all(line.time_unix_nano == line.attributes["injected_unix_nano"] for line in injected)


FORKS = """
        def forked(name, daemon=False):
            if os.fork() == 0:
                if daemon:
                    os.setsid()
                    if os.fork():
                        os._exit(0)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                flag(name)
                time.sleep(60)
        """


def test_what_remains_of_a_replica_is_ended_workers_included(launch: Launch) -> None:
    launch.start(FORKS + """
        join()
        log.close()
        if replica == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            forked(f"worker{rank}")
            (here / f"pid{rank}").write_text(str(os.getpid()))
        flag(f"joined{replica}{rank}")
        [wait(f"joined{other}") for other in ("00", "01", "10", "11")]
        if (replica, rank) == (1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        wait("go" if replica == 0 else "never")
        """, replicas=2, ranks_per_replica=2)
    until(lambda: launch.flag("pid1").exists() and launch.flag("joined00").exists())
    until(lambda: len(launch.alive()) == 5, "front, supervisor, coordinator and the two ranks of replica 0")
    assert launch.process is not None
    assert launch.process.poll() is None
    launch.flag("go").touch()
    assert launch.wait() == 0
    assert launch.alive() == set()


def test_even_a_daemon_with_its_own_session_does_not_outlive_the_run(launch: Launch) -> None:
    assert launch.start(FORKS + """
        forked(f"daemon{replica}", daemon=True)
        wait(f"daemon{replica}")
        """).wait() == 0
    assert launch.alive() == set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_passed_on_and_name_the_exit_code(launch: Launch, number: int, code: int) -> None:
    launch.start("""
        def stop(number, frame):
            print("caught", signal.Signals(number).name)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        flag(f"ready{replica}")
        time.sleep(60)
        """)
    until(lambda: all(launch.flag(f"ready{replica}").exists() for replica in range(3)))
    launch.signal(number)
    assert launch.wait() == code
    for replica in range(3):
        assert f"[r{replica}] caught {signal.Signals(number).name}" in launch.output
    assert launch.alive() == set()


STUBBORN = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        flag(f"ready{replica}")
        if replica == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(60)
        """


def test_who_ignores_sigterm_or_is_stopped_is_killed_after_the_grace(launch: Launch) -> None:
    launch.start(STUBBORN)
    until(lambda: all(launch.flag(f"ready{replica}").exists() for replica in range(3)))
    launch.signal(signal.SIGTERM)
    assert launch.wait() == 143
    assert launch.alive() == set()


def test_a_second_signal_does_not_wait_for_the_grace(launch: Launch) -> None:
    launch.start(STUBBORN, grace=3600.0)
    until(lambda: all(launch.flag(f"ready{replica}").exists() for replica in range(3)))
    launch.signal(signal.SIGTERM)
    until(lambda: "SIGTERM: passed on" in launch.output)
    launch.signal(signal.SIGINT)
    assert launch.wait() == 143
    assert launch.alive() == set()


LIVELY = FORKS + """
        forked(f"worker{replica}")
        forked(f"daemon{replica}", daemon=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        flag(f"ready{replica}")
        time.sleep(60)
        """


def ready(launch: Launch) -> None:
    names = [f"{kind}{replica}" for kind in ("worker", "daemon", "ready") for replica in range(3)]
    until(lambda: all(launch.flag(name).exists() for name in names))


def test_sigkill_of_the_launcher_leaves_no_process(launch: Launch) -> None:
    launch.start(LIVELY)
    ready(launch)
    assert len(launch.alive()) >= 12
    launch.signal(signal.SIGKILL)
    launch.wait()
    until(lambda: not launch.alive(), f"left: {launch.alive()}")


def test_sigkill_of_the_supervisor_leaves_no_process(launch: Launch) -> None:
    launch.start(LIVELY)
    ready(launch)
    assert launch.process is not None
    (supervisor,) = Path(f"/proc/{launch.process.pid}/task/{launch.process.pid}/children").read_text().split()
    os.kill(int(supervisor), signal.SIGKILL)
    assert launch.wait() == 128 + signal.SIGKILL
    assert "the supervisor was killed by SIGKILL" in launch.output
    assert launch.alive() == set()


def test_sigkill_of_both_leaves_no_rank(launch: Launch) -> None:
    launch.start("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        flag(f"ready{replica}")
        time.sleep(60)
        """)
    until(lambda: all(launch.flag(f"ready{replica}").exists() for replica in range(3)))
    assert launch.process is not None
    (supervisor,) = Path(f"/proc/{launch.process.pid}/task/{launch.process.pid}/children").read_text().split()
    launch.signal(signal.SIGSTOP)               # so that it can't tidy up between the two kills
    os.kill(int(supervisor), signal.SIGKILL)
    launch.signal(signal.SIGKILL)
    launch.wait()
    until(lambda: not launch.alive(), f"left: {launch.alive()}")


def can_unshare() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(
        ["unshare", "-pf", "--mount-proc", "true"], capture_output=True, timeout=20, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs unshare and the right to make a process namespace")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_as_the_first_process_of_a_container(launch: Launch, number: int) -> None:
    launch.start(LIVELY, before=("unshare", "-pf", "--mount-proc", "--kill-child"))
    ready(launch)
    assert launch.process is not None
    (first,) = Path(f"/proc/{launch.process.pid}/task/{launch.process.pid}/children").read_text().split()
    assert Path(f"/proc/{first}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
    os.kill(int(first), number)
    code = launch.wait()
    assert code == 143 if number == signal.SIGTERM else code != 0
    until(lambda: not launch.alive())


def test_a_dead_coordinator_comes_back_at_the_same_place_with_a_higher_incarnation(launch: Launch) -> None:
    launch.start("""
        flag(f"ready{replica}")
        wait("go")
        """)
    until(lambda: all(launch.flag(f"ready{replica}").exists() for replica in range(3)))
    first = next(line for line in launch.output.splitlines() if "incarnation 0" in line).split()
    os.kill(int(first[-1]), signal.SIGKILL)
    until(lambda: "incarnation 1" in launch.output)
    second = next(line for line in launch.output.splitlines() if "incarnation 1" in line).split()
    assert second[4] == first[4]                # the port
    launch.flag("go").touch()
    assert launch.wait() == 0
    assert launch.alive() == set()


def test_a_coordinator_that_never_listens_ends_the_launch(launch: Launch) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('port in use')"]
    code = launch.start("flag('started')", coordinator=broken).wait()
    assert code == NO_COORDINATOR
    assert "[coordinator] port in use" in launch.output
    assert not launch.flag("started").exists()


def test_who_does_not_finish_with_the_others_is_ended(launch: Launch) -> None:
    code = launch.start("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        join()
        for step in range(3 if replica == 2 else 9):
            commit(step, (0, 1, 2) if step < 3 else (0, 1))
        log.close()
        if replica == 2:
            time.sleep(60)
        """).wait()
    assert code == 0
    assert "replica 2 is not among those that finished the run: ended" in launch.output
    assert launch.alive() == set()


def test_a_member_of_the_last_view_may_take_its_time_after_the_last_step(launch: Launch) -> None:
    launch.start("""
        join()
        [commit(step) for step in range(3)]
        log.close()
        flag(f"ready{replica}")
        [wait(f"ready{other}") for other in range(3)]
        if replica == 2:
            time.sleep(3)       # many times what the others would get
            print("saved")
        """, failure_timeout=0.1, grace=0.1)
    assert launch.wait() == 0
    assert "[r2] saved" in launch.output
    assert "finished with 3 of 3" in launch.output


CHATTER = """
        for number in range(40_000):
            print("x" * 200)
        flag(f"printed{replica}")
        """


def test_a_reader_that_stands_still_does_not_hold_up_the_ranks(launch: Launch) -> None:
    reading, writing = os.pipe()
    launch.start(CHATTER, stdout=writing)
    os.close(writing)
    until(lambda: all(launch.flag(f"printed{replica}").exists() for replica in range(3)))
    text = b""
    while data := os.read(reading, 1 << 16):
        text += data
    os.close(reading)
    assert launch.wait() == 0
    lines = text.splitlines()
    assert any(line.startswith(b"[launch]") and b"lines of output dropped" in line for line in lines)
    assert all(line[:2] == b"[r" or line.startswith((b"[launch]", b"[coordinator]")) for line in lines)


def test_nobody_reading_any_more_does_not_end_the_run(launch: Launch) -> None:
    reading, writing = os.pipe()
    launch.start(CHATTER, stdout=writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    assert launch.wait() == 0
    assert all(launch.flag(f"printed{replica}").exists() for replica in range(3))


def test_an_endless_line_is_cut_and_a_progress_bar_is_shown(launch: Launch) -> None:
    assert launch.start("""
        sys.stdout.write("y" * 100_000 + "\\n")
        sys.stdout.write("10%\\r20%\\r\\n")
        """, replicas=1).wait() == 0
    lines = [line for line in launch.output.splitlines() if line.startswith("[r0]")]
    assert sum(line.count("y") for line in lines) == 100_000
    assert max(map(len, lines)) < 10_000
    assert lines[-2:] == ["[r0] 10%", "[r0] 20%"]


def test_bad_usage_starts_nothing(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "recover.cli", "launch", *arguments], text=True, timeout=40,
                              capture_output=True, check=False, env={**os.environ, "PYTHONPATH": str(SOURCE)})

    script, plan = tmp_path / "s.py", tmp_path / "plan.yaml"
    script.write_text("raise SystemExit('started')")
    plan.write_text("- {replica: 7, step: 1, place: fence, action: kill}")
    for arguments, said in ((("absent.py",), "there is no script absent.py"),
                            (("--replicas", "0", str(script)), "--replicas"),
                            (("--replicas", "2", "--fault", str(plan), str(script)), "replicas 0 to 1"),
                            (("--listen", "nowhere", str(script)), "HOST:PORT")):
        done = run(*arguments)
        assert done.returncode == 2, done
        assert said in done.stderr
        assert "started" not in done.stderr
