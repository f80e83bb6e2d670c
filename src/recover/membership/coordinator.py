"""The coordinator as a process: `python -m recover.membership.coordinator --listen HOST:PORT ...`.

It holds soft state only and may be killed and started again at any time on the same address, each time with a higher
`--incarnation`: members announce themselves, and the view is rebuilt. Exit codes: 0 told to end (SIGTERM, SIGINT), 2 a
wrong argument, the address can't be listened on, or too few open files are allowed. Imports no torch, so that it is up in a
fraction of a second.

A second one may stand by on another host (see `standby.py`). The first is then started with `--quorum SECOND`, the second
with `--standby FIRST`, and members are given both addresses. Whichever is started again later: with `--standby OTHER`.
"""
from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from recover import events
from recover.config import Timeouts
from recover.membership import files
from recover.membership.address import parse_address, parse_addresses, read_token, show_address
from recover.membership.registrar import Registrar
from recover.membership.server import Server
from recover.membership.succession import Succession
from recover.priority import favour

__all__ = ["Server", "main"]

log = logging.getLogger("recover.membership")

EXIT_USAGE = 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recover.membership.coordinator",
                                     description="Keeps the membership of one run.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="port 0: any free one (see --port-file)")
    parser.add_argument("--token-file", required=True, type=Path, help="holds the secret that all ranks share")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--replicas", required=True, type=int, help="how many replicas make the first view")
    parser.add_argument("--max-replicas", type=int, help="how many replicas the run may have; by default any number")
    parser.add_argument("--ranks-per-replica", type=int, default=1)
    parser.add_argument("--failure-timeout", type=float, default=Timeouts().failure_timeout, help="seconds")
    parser.add_argument("--incarnation", type=int, default=0, help="must be higher at each new start for the same run")
    parser.add_argument("--standby", metavar="HOST:PORT[,...]", help="stand by for the coordinators there: act once none of "
                        "them does, and more than half of the members have come here")
    parser.add_argument("--quorum", metavar="HOST:PORT[,...]", help="those there stand by for this one: never go on with less "
                        "than half of the members that may be alive (--standby implies it)")
    parser.add_argument("--events", type=Path, help="directory for the event log")
    parser.add_argument("--port-file", type=Path, help="where to write the port once it is bound")
    return parser.parse_args(argv)


def write_atomically(path: Path, text: str) -> None:
    """Whoever waits for the file sees nothing, or all of it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


async def serve(options: argparse.Namespace, token: bytes, sink: events.Log) -> int:
    """Listen until told to end; the exit code."""
    host, port = parse_address(options.listen)
    registrar = Registrar(options.replicas, options.ranks_per_replica, options.incarnation, sink,
                          options.max_replicas)
    others = None
    if options.standby is not None or options.quorum is not None:
        registrar.quorum = True
        others = Succession(parse_addresses(options.standby or options.quorum), options.replicas, options.standby is not None)
    server = Server(registrar, Timeouts(failure_timeout=options.failure_timeout), token, options.run_id, others)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        port = await server.start(host, port)
    except OSError as error:
        print(f"can't listen on {options.listen}: {error.strerror or error}; choose another address, or "
              "end what has it", file=sys.stderr)
        return EXIT_USAGE
    address = show_address(host, port)
    log.info("listening on %s for %d replicas of %d ranks, incarnation %d", address, options.replicas,
             options.ranks_per_replica, options.incarnation)
    sink.emit(events.COORDINATOR_START, incarnation=options.incarnation, address=address, pid=os.getpid())
    if options.port_file:
        write_atomically(options.port_file, f"{port}\n")
    await ended.wait()
    await server.stop()
    sink.emit(events.COORDINATOR_END, incarnation=options.incarnation, exit_code=0)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The process: arguments in, exit code out."""
    options = parse(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    sink: events.Log = events.NullLog()
    try:
        token = read_token(options.token_file)
        sink = events.open_log(options.events, options.run_id, None, None, role="coordinator")
        files.for_coordinator(options.replicas, options.ranks_per_replica)
        favour()
        return asyncio.run(serve(options, token, sink))
    except (ValueError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return EXIT_USAGE
    finally:
        sink.close()


if __name__ == "__main__":
    sys.exit(main())
