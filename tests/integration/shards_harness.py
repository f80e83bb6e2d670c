"""Ranks of one replica as processes with a Gloo group on loopback. What runs in them is a function of the test module."""
from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = 50.0     # seconds for all ranks together
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
                                "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "torch.distributed.pipelining"])


def _rank(pipe: Any, paths: list[str], rank: int, size: int, meeting: str, body: Callable[..., Any],
          args: tuple[Any, ...]) -> None:
    sys.path[:] = paths
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size,
                                timeout=timedelta(seconds=PATIENCE / 2))
        pipe.send((True, body(*args)))
    except BaseException:       # noqa: BLE001 - the process's edge: the test raises it
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)     # a group whose peer failed would wait for it


def on_ranks(size: int, folder: Path, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(*args)` on `size` ranks; what it returns, by rank. AssertionError with the traceback of the first that failed."""
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_rank, args=(theirs, list(sys.path), rank, size, str(meeting), body, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        waiting = {pipe.fileno(): rank for rank, pipe in enumerate(pipes)}
        results: dict[int, Any] = {}
        while len(results) < size:
            ready = multiprocessing.connection.wait([pipes[r] for r in waiting.values()], timeout=PATIENCE)
            assert ready, f"ranks {sorted(waiting.values())} gave no result within {PATIENCE} s"
            for pipe in ready:
                rank = waiting.pop(pipe.fileno())       # type: ignore[union-attr]
                try:
                    fine, results[rank] = pipe.recv()   # type: ignore[union-attr]
                except EOFError:
                    raise AssertionError(f"rank {rank} died without a word") from None
                assert fine, f"rank {rank}: {results[rank]}"
        return [results[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.kill()
            process.join()
