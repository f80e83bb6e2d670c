"""The command `recover`. Everything behind a command is imported when it is used: an audit needs no torch."""
from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from recover.simulate.cluster.command import cluster

if TYPE_CHECKING:
    from recover.report.audit import Result

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Keeps a pre-training run on its failure-free trajectory while machines die under it.")
simulate_app = typer.Typer(no_args_is_help=True, help="Deterministic simulations of the protocol, and of clusters that fail.")
simulate_app.command("cluster")(cluster)
app.add_typer(simulate_app, name="simulate")


def _refuse(error: Exception) -> NoReturn:
    print(f"recover: {error}", file=sys.stderr)
    raise typer.Exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("recover-training"))
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                                help="Print the version.")] = False) -> None:
    pass


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    script: Annotated[Path, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on to the script.")] = None,
    replicas: Annotated[int, typer.Option(help="Complete copies of the model.")] = 1,
    ranks_per_replica: Annotated[int, typer.Option(help="Processes per replica.")] = 1,
    fault: Annotated[Path | None, typer.Option(metavar="PLAN", help="Break things on purpose: docs/faults.md.")] = None,
    events: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to keep events and receipts.")] = None,
    failure_timeout: Annotated[float, typer.Option(help="Seconds of silence after which a member is lost.")] = 5.0,
    threads_per_rank: Annotated[int, typer.Option(help="The same whatever the number of replicas.")] = 1,
    interface: Annotated[str | None, typer.Option(help="Address or interface of the data connections.")] = None,
    backend: Annotated[str | None, typer.Option(help="Of the sums between replicas: tcp, ulfm.")] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")] = "127.0.0.1:0",
    grace: Annotated[float, typer.Option(help="Seconds between a polite end and SIGKILL.")] = 5.0,
    run_id: Annotated[str | None, typer.Option(help="Identity of the run; by default a random one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Secret of the run; by default a fresh one.")] = None,
    restart: Annotated[int, typer.Option(metavar="N", help="Start a dead replica again, up to N times without a step that it "
                                                           "committed.")] = 0,
    spares: Annotated[int, typer.Option(metavar="K", help="The last K replicas have no work before another dies.")] = 0,
    min_replicas: Annotated[int, typer.Option(metavar="M", help="With fewer, see --below.")] = 0,
    below: Annotated[str, typer.Option(metavar="wait|stop", help="What to do with fewer than --min-replicas.")] = "wait",
    max_replicas: Annotated[int | None, typer.Option(metavar="N", help="How far the run may grow, see --join.")] = None,
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Start --replica K only, for the run of that "
                                                                       "coordinator.")] = None,
    replica: Annotated[int | None, typer.Option(metavar="K", help="Number of the replica that joins.")] = None,
) -> None:
    """Run SCRIPT in every rank, and go on while replicas die.

    Exit codes: 0 finished; 2 bad usage; 3 a replica ended before any had joined; 4 all replicas gone; 5 a planned fault
    did not happen; 6 a replica of the last view failed; 7 no coordinator; 75 all had to go, start the run again;
    130, 143 interrupted. More in docs/faults.md.
    """
    from recover.launch import Options
    from recover.launch import launch as run

    if str(script).startswith("-"):
        _refuse(ValueError(f"there is no option {script} (see recover launch --help)"))

    try:
        if events is not None:
            events.mkdir(parents=True, exist_ok=True)
        if join is not None and run_id is None:
            raise ValueError("--join needs the --token-file and the --run-id that the run was started with")
        if below not in ("wait", "stop"):
            raise ValueError(f"--below must be wait or stop, not {below!r}")
        options = Options(script=script, arguments=tuple(arguments or ()), replicas=replicas, faults=fault,
                          ranks_per_replica=ranks_per_replica, events=events, failure_timeout=failure_timeout,
                          threads_per_rank=threads_per_rank, interface=interface, backend=backend, listen=listen, grace=grace,
                          token_file=token_file, restart=restart, spares=spares, min_replicas=min_replicas,
                          max_replicas=max_replicas, below="stop" if below == "stop" else "wait", join=join, replica=replica)
        options = options if run_id is None else replace(options, run_id=run_id)
    except (ValueError, OSError) as error:
        _refuse(error)
    raise typer.Exit(run(options))


@app.command()
def audit(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of events.")],
    key_file: Annotated[Path | None, typer.Option(help="The key that the receipts were sealed with, if any.")] = None,
) -> None:
    """Re-check a run from its receipts alone; exit with 1 and name the first offence, if there is one."""
    from recover.report.audit import audit as check

    try:
        if directory.is_dir() and not any(directory.glob("events-*.jsonl")):
            raise FileNotFoundError(f"there are no events (events-*.jsonl) in {directory}: give the directory that was given to "
                                    "recover launch --events")
        result = check(directory, b"" if key_file is None else key_file.read_bytes().strip())
    except OSError as error:
        _refuse(error)
    _show(result)
    if not result.ok:
        more = len(result.offences) - 1
        print(f"OFFENCE {result.offence}" + (f" (and {more} more)" if more else ""), file=sys.stderr)
        raise typer.Exit(1)
    print("clean: every committed step is made of its microbatches, each once, and all replicas agree")


def _show(result: Result) -> None:
    from rich.console import Console

    from recover.report.audit import tables

    console = Console()
    for table in tables(result):
        console.print(table)


@app.command("events-schema")
def events_schema() -> None:
    """Print the JSON Schema of event lines (docs/events.schema.json)."""
    from recover.events import json_schema_text

    sys.stdout.write(json_schema_text())


@simulate_app.command("protocol")
def simulate_protocol(
    seeds: Annotated[str, typer.Option(metavar="A:B", help="The seeds A to B-1.")] = "0:1000",
    positions: Annotated[str | None, typer.Option(metavar="N|N:M", help="Ranks per replica (N to M in turn); by default the "
                                                                         "seed says.")] = None,
    processes: Annotated[int | None, typer.Option(help="By default one per processor.")] = None,
) -> None:
    """Run seeded failure schedules over the protocol; exit with 1 and print the seed of a violation."""
    first, colon, last = seeds.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        _refuse(ValueError(f"--seeds must be A:B with A < B, not {seeds!r}"))
    low, _, high = (positions or "").partition(":")
    if positions is not None and not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low)):
        _refuse(ValueError(f"--positions must be N or N:M with 1 <= N <= M, not {positions!r}"))
    from recover.simulate.protocol import number, run_seeds

    ranks = range(int(low), int(high or low) + 1) if positions is not None else None
    views, broken = run_seeds(int(first), int(last), positions=ranks, processes=processes)
    if broken is not None:
        seed, what = broken
        replay = f"recover simulate protocol --seeds {seed}:{seed + 1}"
        print(f"seed {seed}: {what}\nreplay: {replay}" + (f" --positions {number(ranks, seed)}" if ranks else ""))
        raise typer.Exit(1)
    print(f"{sum(views.values())} schedules hold; by number of views: "
          + ", ".join(f"{number}: {count}" for number, count in sorted(views.items())))


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
