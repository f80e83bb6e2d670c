"""Gradient state in bytes per parameter: `python benchmarks/memory.py`.

What a mode needs beside the parameters: buffers of local and reduced sums, `.grad`, transport. Each is measured in a
process of its own, as growth of the resident anonymous memory over a baseline that has the parameters, has run one
forward and backward (then dropped its gradients), and a whole run of a tiny model (imports, threads, arenas: what does
not grow with the parameters). The optimizer is SGD without momentum, which keeps nothing;
activations are one row. `resident` is the highest sample, taken after each backward, after the sums and after the
update; `peak` is the kernel's high-water mark over whole steps, so it has the temporary gradients of autograd, too;
`accounted` are the buckets' own buffers.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

WIDTH, LAYERS, MICROBATCHES, STEPS = 1024, 24, 2, 4
BAR = 8.0
TOLERANCE = 0.25
MODES = {       # name: (what is run, reduction, dtype of parameters, replicas)
    "DDP, bucket views, float32": ("ddp", "", "float32", 1),
    "fast, float32": ("recover", "fast", "float32", 1),
    "exact, float32": ("recover", "exact", "float32", 1),
    "DDP, bucket views, bfloat16": ("ddp", "", "bfloat16", 1),
    "fast, bfloat16": ("recover", "fast", "bfloat16", 1),
    "exact, bfloat16": ("recover", "exact", "bfloat16", 1),
    "fast, float32, 2 replicas": ("recover", "fast", "float32", 2),
    "exact, float32, 2 replicas": ("recover", "exact", "float32", 2),
}


# ---------------------------------------------------------------- in a process of its own

def status(field: str) -> int:
    """A figure of /proc/self/status in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None, field
    return 1024 * int(match[1])


class Meter:
    """Growth of resident memory over a baseline."""

    def __init__(self) -> None:
        self.base, self.base_resident = status("RssAnon"), status("VmRSS")
        self.samples: list[int] = []
        self.reset = False

    def sample(self) -> None:
        self.samples.append(status("RssAnon") - self.base)

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def figures(self, parameters: int, accounted: int) -> dict[str, float]:
        return {"parameters": parameters, "resident": max(self.samples) / parameters,
                "peak": (status("VmHWM") - self.base_resident) / parameters, "accounted": accounted / parameters}


def measure(kind: str, reduction: str, dtype: str, out: Path) -> None:
    import torch
    from torch import nn

    work: Callable[..., int] = with_ddp if kind == "ddp" else with_recover
    warm_up(work, reduction, out)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())])
    model.to(getattr(torch, dtype))
    x = torch.randn(1, WIDTH, dtype=getattr(torch, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    model(x).square().mean().backward()
    optimizer.zero_grad()
    parameters = sum(p.numel() for p in model.parameters())
    meter = Meter()
    accounted = work(model, optimizer, x, meter, reduction, out)
    out.write_text(json.dumps(meter.figures(parameters, accounted)))


def warm_up(work: Callable[..., int], reduction: str, out: Path) -> None:
    """The same with a tiny model, and without the others."""
    import torch

    names = [name for name in os.environ if name.startswith("RECOVER_")]
    kept = {name: os.environ.pop(name) for name in names}
    model = torch.nn.Linear(8, 8)
    work(model, torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False), torch.randn(1, 8), Meter(), reduction,
         out.with_name("warm-up"))
    os.environ |= kept


def with_ddp(model: Any, optimizer: Any, x: Any, meter: Meter, reduction: str, out: Path) -> int:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=0, world_size=1)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for step in range(STEPS):
        if step == 2:
            meter.reset_peak()
        wrapped(x).square().mean().backward()
        meter.sample()
        optimizer.step()
        meter.sample()
        optimizer.zero_grad(set_to_none=False)
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    dist.destroy_process_group()
    return sum(storages.values())


def with_recover(model: Any, optimizer: Any, x: Any, meter: Meter, reduction: str, out: Path) -> int:
    import recover

    run = recover.join(microbatches=MICROBATCHES, reduction=reduction)      # type: ignore[arg-type]
    run.manage(model, optimizer)
    accounted = 0
    with run:
        for step in run.steps(STEPS):
            if step.index == 2:
                meter.reset_peak()
            for _ in step:
                step.backward(model(x).square().mean())
                meter.sample()
            meter.sample()
            optimizer.step()
            meter.sample()
            accounted = max(accounted, buffers(run, model))
    return accounted


def buffers(run: Any, model: Any) -> int:
    """Bytes of the buckets' buffers and of `.grad`, shared ones once."""
    tensors = [t for bucket in run.sums.store.buckets for t in (bucket.local, bucket.reduced, bucket.scratch,
                                                                bucket.local_tail, bucket.reduced_tail)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# ---------------------------------------------------------------- the driver

def child(mode: str, work: Path) -> dict[str, float]:
    """The figures of one mode; of several replicas the highest."""
    kind, reduction, dtype, replicas = MODES[mode]
    # large blocks are given back to the system as soon as they are freed, so that resident memory is what is in use
    precise = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    arguments = ["--measure", kind, "--reduction", reduction, "--dtype", dtype]
    out = work / re.sub(r"\W+", "-", mode)
    out.mkdir()
    if replicas > 1:
        os.environ |= precise
        with common.Launch(__file__, out, replicas=replicas, arguments=arguments) as run:
            run.wait()
    else:
        subprocess.run([sys.executable, __file__, *arguments], check=True, timeout=common.LAUNCH_LIMIT,
                       env=common.environment(BENCH_OUT=str(out), **precise))
    found = [json.loads(path.read_text()) for path in out.glob("memory-*.json")]
    assert len(found) == replicas, f"{len(found)} of {replicas} processes measured something"
    return {key: max(each[key] for each in found) for key in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description="gradient state in bytes per parameter")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--reduction", default="fast", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if options.measure:
        out = Path(os.environ["BENCH_OUT"]) / f"memory-{os.environ.get('RECOVER_REPLICA', '0')}.json"
        measure(options.measure, options.reduction, options.dtype, out)
        return 0
    with common.workdir() as work:
        figures = {mode: common.rounded(child(mode, work), 2) for mode in MODES}
    common.show(f"gradient state, bytes per parameter ({WIDTH * WIDTH * LAYERS / 1e6:.1f} million parameters)",
                ("mode", "resident", "peak", "accounted"),
                [(mode, f["resident"], f["peak"], f["accounted"]) for mode, f in figures.items()])
    met = abs(figures["fast, float32"]["resident"] - BAR) <= TOLERANCE
    if not options.no_record:
        common.record("memory", f"fast, float32: {BAR:g} bytes per parameter", met,
                      {"width": WIDTH, "layers": LAYERS, "microbatches": MICROBATCHES, "tolerance": TOLERANCE},
                      {"bytes_per_parameter": figures})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
