"""What stands between `fork` and the real program of every child: it ties the child's life to the supervisor's.

Run as a plain file by a bare interpreter (`python -I -S shim.py PARENT PROGRAM [ARGUMENT...]`), so it imports nothing
of the package. It asks the kernel to be killed when the supervisor's thread that started it ends (PR_SET_PDEATHSIG
outlives `exec`), makes sure that this has not happened already, puts the signals' dispositions back to what a program
expects (an interpreter ignores SIGPIPE, a shell's background job ignores SIGINT, and both are inherited), and becomes
the program.
"""
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        pass                                # not Linux: the supervisor's own ways must do
    if os.getppid() != parent:
        sys.exit("recover launch: the supervisor was gone before this process started")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"recover launch: can't start {program[0]}: {error}")


if __name__ == "__main__":
    main()
