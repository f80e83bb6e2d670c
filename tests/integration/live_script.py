"""The training script of the liveness tests: one replica stalls once, in one of the ways that machines know."""
from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

from harness import Script
from run_script import Setup, update

import recover
from recover.membership.member import Member


def stall(how: str, seconds: float) -> None:
    if how == "native":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))   # a call that keeps the interpreter lock
    else:
        time.sleep(seconds)


def train(script: Script) -> None:
    """`stall`: {replica, step, index, how, seconds, pause (seconds, or None), nap (of every microbatch)}."""
    setup = Setup(script)
    plan: dict[str, Any] = setup.s["stall"]
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            for turn, microbatch in enumerate(step):
                script.say("microbatch", step=microbatch.step, index=microbatch.index)
                time.sleep(plan.get("nap", 0.01))
                if run.replica == plan["replica"] and (step.index, turn) == (plan["step"], plan.get("turn", 1)):
                    script.say("stalls")
                    pause = run.pause("stall", plan["pause"]) if "pause" in plan else contextlib.nullcontext()
                    with pause:
                        stall(plan["how"], plan["seconds"])
                    script.say("goes on")
                step.backward(setup.loss(microbatch)[0])
            update(setup)
            script.say("step", step=step.index, loss=step.loss.hex(), metrics=step.metrics)


def catches(script: Script) -> None:
    """Whoever wants to do more than leave can catch it."""
    try:
        train(script)
    except recover.Evicted as evicted:
        script.say("evicted", text=str(evicted), code=evicted.code)


def unvouched(script: Script) -> None:
    """Nobody vouches for the rank while its interpreter is busy."""
    Member.vouch = lambda self: None                    # type: ignore[method-assign]
    train(script)
