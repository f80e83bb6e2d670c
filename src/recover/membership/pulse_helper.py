"""The process that vouches for a rank (see `pulse.py`): `python -I -S pulse_helper.py PARENT SOCKET TETHER SECONDS FRAME`.

Imports nothing of the package. Every `SECONDS` it looks at the process PARENT in /proc and sends FRAME (hexadecimal) over
the connected descriptor SOCKET, unless that process is stopped, traced or dead. It ends when TETHER or SOCKET does.
"""
import os
import select
import signal
import sys


def runs(parent: int) -> bool:
    """Whether the process is there, and neither stopped (T), traced (t), nor dead (Z, X)."""
    try:
        with open(f"/proc/{parent}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X")
    except OSError:
        return False


def main() -> None:
    parent, sock, tether = map(int, sys.argv[1:4])
    seconds, frame = float(sys.argv[4]), bytes.fromhex(sys.argv[5])
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # a terminal's: for the rank to decide
    os.set_blocking(sock, False)
    while True:
        ready, _, _ = select.select([sock, tether], [], [], seconds)
        try:
            if tether in ready or os.getppid() != parent or (sock in ready and not os.read(sock, 4096)):
                return
            if not ready and runs(parent):
                os.write(sock, frame)
        except BlockingIOError:                         # the coordinator does not read just now
            pass
        except OSError:
            return


if __name__ == "__main__":
    main()
