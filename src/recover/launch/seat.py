"""Stands in `mpirun`'s eyes for a rank that somebody else started. Run as a script: `seat.py DIRECTORY`.

It writes down the environment by which a process finds its place in the MPI job, waits to be told (through a pipe in the
same directory) which process has taken that place, and dies the moment that process does: this is how MPI learns of it.
It also goes when `mpirun` does. Standard library only: it starts in milliseconds.
"""
import json
import os
import select
import signal
import sys

KEPT = ("PMIX_", "OMPI_", "PRTE_", "OPAL_")
LOOK = 1000                     # milliseconds between looks whether mpirun is still there


def main(directory: str) -> None:
    """Offer this seat, then sit on it."""
    parent, number = os.getppid(), os.environ["OMPI_COMM_WORLD_RANK"]
    pipe = os.path.join(directory, f"taken.{number}")
    os.mkfifo(pipe, 0o600)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    path = os.path.join(directory, f"seat.{number}")
    with open(path + ".new", "w") as file:
        json.dump({name: value for name, value in os.environ.items() if name.startswith(KEPT)}, file)
    os.rename(path + ".new", path)
    _wait(reading, parent)
    pid = int(os.read(reading, 20))
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:                          # gone already
        pass
    else:
        _wait(process, parent)
    os.kill(os.getpid(), signal.SIGKILL)                # as a rank that did not leave politely: the job must go on


def _wait(descriptor: int, parent: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll(LOOK):
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
