"""`recover launch --backend ulfm`: a run over MPI that loses a replica ends with the bits of one that lost none."""
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recover.launch.mpi import Seats, find_mpirun

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None or find_mpirun() is None,
                               reason='needs pip install "recover-training[ulfm]"')
SCRIPT = """
import hashlib, sys, torch, recover
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
optimizer = torch.optim.AdamW(model.parameters())
run = recover.join(microbatches=6, reduction="exact", backend=(sys.argv[1:] or [None])[0])
run.manage(model, optimizer)
for step in run.steps(6):
    for microbatch in step:
        x = torch.randn(8, 20)
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("RESULT", run.backend.__class__.__name__, hashlib.sha256(bits).hexdigest(), flush=True)
"""


def launch(tmp_path, *options, script=()):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-m", "recover.cli", "launch", *options, str(path), *script], text=True, timeout=100,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    results = {tuple(line.split()[-2:]) for line in done.stdout.splitlines() if "RESULT" in line}
    return done.returncode, results, done.stdout


@needs_mpi
@pytest.mark.parametrize("kill", [True, False])
def test_a_replica_dies_and_the_bits_are_those_of_the_other_backend(tmp_path, kill):
    before = list(Path("/dev/shm").glob("sm_segment.*"))
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults:\n  - {replica: 1, step: 2, place: 'compute:1', action: kill}\n")
    code, results, said = launch(tmp_path, "--replicas", "3", "--backend", "ulfm", *(["--fault", str(plan)] if kill else []))
    assert code == 0, said
    _, plain, _ = launch(tmp_path, "--replicas", "1")
    assert {name for name, _ in results} == {"UlfmBackend"}
    assert {name for name, _ in plain} == {"TcpBackend"}
    assert {bits for _, bits in results} == {bits for _, bits in plain}
    assert said.count("RESULT") == (2 if kill else 3), said
    assert list(Path("/dev/shm").glob("sm_segment.*")) == before, "shared memory was left behind"


@needs_mpi
def test_ranks_of_different_mpi_jobs_are_refused(tmp_path, monkeypatch):
    """Without seats each rank is an MPI job of its own."""
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))
    code, results, said = launch(tmp_path, "--replicas", "2", script=["ulfm"])
    assert code != 0
    assert "mpi_job" in said, said
    assert not results


def sitting_in(seats):
    return [p for p in psutil.Process(seats.process.pid).children() if p.status() != psutil.STATUS_ZOMBIE]


@needs_mpi
def test_seats_go_with_those_who_sit_in_them():
    seats = Seats(2)
    try:
        assert len(sitting_in(seats)) == 2
        sitting = subprocess.Popen(["sleep", "100"])
        seats.take(0, sitting.pid)
        assert seats.environment(0)["PMIX_RANK"] == "0"
        sitting.kill()
        sitting.wait()
        until = time.monotonic() + 20
        while len(sitting_in(seats)) > 1:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.5)
        assert len(left := sitting_in(seats)) == 1, "the other seat went too"
    finally:
        seats.close()
    assert psutil.wait_procs(left, 5)[1] == []


def test_without_mpirun_the_launch_is_refused(tmp_path, monkeypatch):
    from recover.launch import Options, mpi
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    script = tmp_path / "script.py"
    script.touch()
    Options(script=script, replicas=2, backend="tcp")
    with pytest.raises(ValueError, match="pip install"):
        Options(script=script, replicas=2, backend="ulfm")


@needs_mpi
@pytest.mark.parametrize("later", [{"restart": 1}, {"max_replicas": 3}, {}])
def test_nobody_can_come_later(tmp_path, later):
    from recover.launch import Options
    script = tmp_path / "script.py"
    script.touch()
    Options(script=script, replicas=2, backend="tcp", **later)
    if not later:
        Options(script=script, replicas=2, backend="ulfm")
        return
    with pytest.raises(ValueError, match="nobody can come later"):
        Options(script=script, replicas=2, backend="ulfm", **later)
