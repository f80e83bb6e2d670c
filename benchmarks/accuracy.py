"""How exact `fast` is: `python benchmarks/accuracy.py`.

Four replicas train a small GPT with dropout while three of them are killed, in compute, in the reduction and before the
update. Every replica keeps, per step, the parameters before it and the gradient that the script got. Afterwards this
process computes all B microbatch gradients of each step again from those parameters, one by one in float32 with the
same seeds, sums them in float64, and compares::

    error = |gradient of the script - float64 sum / B| / |float64 sum / B|        (2-norms over all parameters)

That these are the *same* float32 gradients is checked by the losses: all B of each step must be bit for bit those that
travelled with the sums. For comparison, `plain` is the error of the ordinary float32 loop in one process.
"""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.ROOT / "examples"))

REPLICAS, MICROBATCHES, STEPS, BATCH, BLOCK, SEED = 4, 16, 12, 4, 64, 3
KILLS = ((2, 2, "compute:1"), (3, 5, "reduce:1"), (0, 8, "optimizer"))      # replica, step, place
BAR = 1e-6


def build() -> tuple[Any, Any]:
    """(model, dataset)"""
    import torch

    from model import GPT, Config
    from text import load

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    return GPT(Config(block=BLOCK, layers=2, width=128, dropout=0.1)), load(None, BLOCK, limit=1 << 20)


def train(out: Path) -> None:
    """A rank: keeps parameters, gradient and losses of every step."""
    import torch

    import recover
    from model import loss_fn

    model, dataset = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = recover.join(microbatches=MICROBATCHES, seed=SEED, reduction="fast", bucket_bytes=1 << 19, first_bucket_bytes=1 << 17)
    run.manage(model, optimizer)
    data = run.data(dataset, batch_size=BATCH)
    with run:
        for step in run.steps(STEPS):
            before = [p.detach().clone() for p in model.parameters()]
            for microbatch in step:
                x, y = data[microbatch]
                step.backward(loss_fn(model(x), y))
            committed = run.engine.committed
            assert committed is not None
            path = out / f"step-{step.index}-replica-{run.replica}.pt"
            torch.save({"before": before, "gradient": [p.grad for p in model.parameters()],
                        "losses": committed.gradient.losses}, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)      # whoever dies in between leaves no half file
            optimizer.step()
            optimizer.zero_grad()


class Reference:
    """Gradients of single microbatches, as one process without us would compute them."""

    def __init__(self) -> None:
        from recover.training.sampling import Sampler, Samples

        self.model, dataset = build()
        self.data = Samples(dataset, Sampler(len(dataset), SEED, MICROBATCHES, BATCH))

    def step(self, step: int, before: list[Any]) -> tuple[Any, Any, list[float]]:
        """(float64 sum, float32 sum, losses) over all microbatches of a step; sums are flat."""
        import torch

        from model import loss_fn
        from recover.training.sampling import Microbatch, seed_everything

        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), before, strict=True):
                parameter.copy_(value)
        size = sum(p.numel() for p in self.model.parameters())
        wide, narrow, losses = torch.zeros(size, dtype=torch.float64), torch.zeros(size), []
        for index in range(MICROBATCHES):
            seed_everything(SEED, step, index)
            x, y = self.data[Microbatch(step, index)]
            loss = loss_fn(self.model(x), y)
            self.model.zero_grad()
            loss.backward()
            gradient = flat([p.grad for p in self.model.parameters()])
            wide += gradient
            narrow += gradient
            losses.append(loss.item())
        return wide, narrow, losses


def flat(tensors: list[Any]) -> Any:
    import torch

    return torch.cat([t.reshape(-1) for t in tensors])


def compare(out: Path) -> list[dict[str, Any]]:
    """Per step: errors, and who was there."""
    import torch

    reference, rows = Reference(), []
    killed = {step: place for _, step, place in KILLS}
    for step in range(STEPS):
        files = sorted(out.glob(f"step-{step}-replica-*.pt"))
        kept = [torch.load(path) for path in files]
        wide, narrow, losses = reference.step(step, kept[0]["before"])
        target = wide / MICROBATCHES
        for each in kept:
            if list(each["losses"]) != losses:
                raise ValueError(f"step {step}: the losses differ from those computed again, so the gradients may, too")
        errors = [float((flat(each["gradient"]).double() - target).norm() / target.norm()) for each in kept]
        rows.append({"step": step, "killed_at": killed.get(step, ""), "replicas": len(files), "error": max(errors),
                     "plain": float((narrow.double() / MICROBATCHES - target).norm() / target.norm()),
                     "equal_bits": all(torch.equal(flat(e["gradient"]), flat(kept[0]["gradient"])) for e in kept)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="error of the reduced gradient in fast mode")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if common.inside():
        train(Path(os.environ["BENCH_OUT"]))
        return 0
    plan = "faults:\n" + "".join(f'  - {{replica: {r}, step: {s}, place: "{p}", action: kill}}\n' for r, s, p in KILLS)
    with common.workdir() as work:
        with common.Launch(__file__, work, replicas=REPLICAS, plan=plan) as run:
            run.wait()
        rows = compare(work)
    common.show("relative error of the gradient that the script gets",
                ("step", "killed at", "replicas", "error", "plain float32"),
                [(r["step"], r["killed_at"], r["replicas"], f"{r['error']:.2e}", f"{r['plain']:.2e}") for r in rows])
    met = all(row["error"] <= BAR and row["equal_bits"] for row in rows)
    if not options.no_record:
        common.record("accuracy", f"fast: relative error at most {BAR:g} in every step, also with failures", met,
                      {"replicas": REPLICAS, "microbatches": MICROBATCHES, "steps": STEPS, "kills": [list(k) for k in KILLS]},
                      {"worst": max(row["error"] for row in rows), "steps": rows})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
