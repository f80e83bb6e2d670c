"""The planner of clusters that fail: against closed forms, its own accounting, and what was published."""
from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from recover.cli import app
from recover.simulate.cluster import forms
from recover.simulate.cluster.engine import Run
from recover.simulate.cluster.model import Costs, Failures, Goal, Job, Outcome, Plan
from recover.simulate.cluster.presets import CRUSOE_COSTS, PRESETS
from recover.simulate.cluster.report import Figure, Result, compare, recommend
from recover.simulate.cluster.strategies import WAYS

JOB = Job(replicas=4, gpus_per_replica=2, microbatches=16, tokens_per_step=1600, microbatch=1.0, reduction=1.0)     # 5 s
FREE = Costs(detection=0, reform=0, join=0, replica_restart=0, restart=0, save=0, memory_restart=0, memory_save=0, swap=0,
             stall=0, interval=10)


def plan(*, job: Job = JOB, costs: Costs = FREE, goal: Goal | None = None, **failures: object) -> Plan:
    return Plan(job=job, failures=Failures(**failures), costs=costs, goal=goal or Goal(steps=100))     # type: ignore[arg-type]


def play(way: str, question: Plan, seed: int = 0) -> Outcome:
    return Run(question, WAYS[way](question), seed).play()


def shares(way: str, question: Plan, seeds: int) -> tuple[float, float]:
    return forms.interval([play(way, question, seed).of_allocated(question.job) for seed in range(seeds)])


# -- without failures -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", sorted(WAYS))
def test_without_failures_every_way_does_what_was_planned(way: str) -> None:
    outcome = play(way, plan())
    assert outcome.seconds == pytest.approx(500)
    assert (outcome.tokens, outcome.committed, outcome.discarded, outcome.failures) == (160_000, 100, 0, 0)
    assert outcome.of_alive(JOB) == pytest.approx(1) == outcome.of_allocated(JOB)


def test_saves_take_their_time() -> None:
    assert play("checkpoint-restart", plan(costs=replace(FREE, save=7))).seconds == pytest.approx(500 + 9 * 7)
    assert play("balanced", plan(costs=replace(FREE, save=7, rare=2))).seconds == pytest.approx(500 + 4 * 7)


def test_spares_are_paid_for() -> None:
    assert play("balanced", plan(spares=8)).of_allocated(JOB) == pytest.approx(0.5)


# -- closed forms ---------------------------------------------------------------------------------------------------
def test_young_daly_is_where_the_exact_form_is_best() -> None:
    best = max(range(100, 20_000, 10), key=lambda work: forms.checkpointed(work, 60, 300, 20_000))
    assert forms.young_daly(60, 20_000) == pytest.approx(best, rel=0.02)
    assert forms.young_daly(0.5, 1e6) == pytest.approx(math.sqrt(2 * 0.5 * 1e6), rel=0.01)


@pytest.mark.parametrize(("save", "restart", "mtbf"), [(10.0, 50.0, 2000.0), (30.0, 100.0, 600.0)])
def test_checkpoints_yield_what_daly_says(save: float, restart: float, mtbf: float) -> None:
    costs = replace(FREE, save=save, restart=restart, interval=40)
    question = plan(costs=costs, goal=Goal(seconds=400 * mtbf), mean=mtbf * JOB.gpus, repair=0.0)
    mean, half = shares("checkpoint-restart", question, 12)
    exact = forms.checkpointed(40 * 5.0, save, restart, mtbf)
    assert mean == pytest.approx(exact, abs=max(2 * half, 0.01))
    assert half < 0.02
    off = forms.checkpointed(40 * 5.0, save, 2 * restart, mtbf)
    assert abs(mean - off) > 2 * half, "another restart time would have been told from it"


def test_a_failure_loses_what_it_should_on_average() -> None:
    """Between saves of 200 s, exponential failures, nothing else costs time."""
    question = plan(costs=replace(FREE, interval=40), goal=Goal(seconds=2e6), mean=1000.0 * JOB.gpus, repair=0.0)
    outcome = play("checkpoint-restart", question)
    lost = (outcome.seconds - outcome.tokens / JOB.tokens_per_step * JOB.step) / outcome.failures
    assert lost == pytest.approx(forms.lost_when_it_fails(200, 1000), rel=0.06)


@pytest.mark.parametrize("way", ["balanced", "replica-rejoin", "drop-and-shrink"])
def test_a_stall_at_equal_intervals_costs_its_share(way: str) -> None:
    costs = replace(FREE, reform=100, stall=100, interval=10**9)
    question = plan(costs=costs, goal=Goal(seconds=1e6), law="periodic", mean=1000.0, repair=0.0)
    assert play(way, question).of_allocated(JOB) == pytest.approx(forms.stalled(1000, 100), abs=0.01)


def test_failures_come_as_often_as_they_should() -> None:
    for law in ({"law": "exponential"}, {"law": "weibull", "shape": 1.0}):
        question = plan(goal=Goal(seconds=1e6), mean=1000.0 * JOB.gpus, repair=0.0, **law)
        counts = [float(play("balanced", question, seed).failures) for seed in range(5)]
        assert forms.interval(counts)[0] == pytest.approx(1000, rel=0.05)


def test_weibull_of_shape_one_is_exponential_and_below_one_fails_new_machines_more() -> None:
    def failures(shape: float) -> float:
        question = plan(goal=Goal(seconds=3e5), law="weibull", shape=shape, mean=2e5 * JOB.gpus_per_replica, repair=0.0)
        return sum(play("balanced", question, seed).failures for seed in range(40)) / 40

    assert failures(1.0) == pytest.approx(4 * 3e5 / 2e5, rel=0.2)
    assert failures(0.5) > 1.3 * failures(1.0)


def test_the_confidence_interval_is_students() -> None:
    values = [float(v) for v in range(10)]
    mean, half = forms.interval(values)
    assert (mean, half) == (4.5, pytest.approx(2.262157 * 3.027650 / math.sqrt(10), rel=1e-3))
    assert forms.interval([1.0]) == (1.0, math.inf)


# -- what a failure costs -------------------------------------------------------------------------------------------
def one_failure(way: str, *, costs: Costs = FREE, at: float = 52.0, **more: object) -> Outcome:
    """20 steps of 5 s; 52 s: the eleventh step has computed two of four microbatches."""
    settings: dict[str, object] = {"repair": math.inf} | more
    return play(way, plan(costs=costs, goal=Goal(steps=20), law="periodic", mean=at, **settings))


def test_in_step_recovery_costs_only_the_lost_microbatches() -> None:
    """Four are lost, three survivors: two more for the slowest; then 9 steps of ceil(16 / 3) = 6 microbatches."""
    outcome = one_failure("balanced-no-rejoin", at=60.0 - 8.0 + 0.001)
    assert outcome.failures == 2                            # the second one at 104.002, in the nineteenth step
    first = replace(plan(goal=Goal(steps=11)), failures=Failures(law="periodic", mean=52.0))
    alone = play("balanced-no-rejoin", first)
    assert (alone.seconds, alone.discarded, alone.tokens) == (pytest.approx(11 * 5 + 2), 0, 11 * 1600)


def test_a_failure_in_the_reduction_costs_the_lost_microbatches_too_but_what_was_reduced_stays() -> None:
    question = replace(plan(goal=Goal(steps=11)), failures=Failures(law="periodic", mean=54.5))
    assert play("balanced-no-rejoin", question).seconds == pytest.approx(55 + 2)


def test_a_dropped_step_is_done_again_by_all_and_the_batch_shrinks() -> None:
    question = replace(plan(goal=Goal(steps=11)), failures=Failures(law="periodic", mean=52.0))
    outcome = play("drop-and-shrink", question)
    assert (outcome.seconds, outcome.discarded) == (pytest.approx(55 + 2), 1)
    assert outcome.tokens == pytest.approx(10 * 1600 + 1200)


def test_checkpoints_take_everybody_back() -> None:
    question = replace(plan(costs=replace(FREE, interval=8, restart=30), goal=Goal(steps=11)),
                       failures=Failures(law="periodic", mean=52.0, repair=0.0))
    outcome = play("checkpoint-restart", question)
    assert (outcome.rolled_back, outcome.discarded) == (2, 1)
    assert outcome.seconds > 52 + 30 + 3 * 5 - 0.001


def test_spares_of_roles_absorb_a_loss_without_any_time() -> None:
    """7 replicas for 8 microbatches: quota 2, four majors, three spares behind the first of them."""
    job = Job(replicas=8, gpus_per_replica=1, microbatches=8, tokens_per_step=8, microbatch=1.0, reduction=1.0)
    question = plan(job=job, goal=Goal(steps=30), law="steps", steps=(10, 20))
    outcome = play("roles-no-rejoin", question)
    assert (outcome.discarded, outcome.tokens, outcome.replicas_left) == (0, 240, 6)
    assert outcome.seconds == pytest.approx(10 * 2 + 20 * 3)


def test_speed_weighted_quotas_make_steps_shorter_where_some_are_slow() -> None:
    slow = plan(job=replace(JOB, slow=0.25, slow_speed=0.5))
    assert play("balanced", slow).seconds == pytest.approx(100 * (4 / 0.5 + 1))
    assert play("speed", slow).seconds < 0.75 * play("balanced", slow).seconds


def test_a_run_without_anybody_left_ends_and_says_so() -> None:
    outcome = play("balanced-no-rejoin", plan(goal=Goal(steps=10_000), law="periodic", mean=100.0))
    assert (outcome.over, outcome.replicas_left, outcome.failures) == ("no replica is left", 0, 4)


def test_all_lost_at_once_comes_back_from_the_last_save() -> None:
    costs = replace(FREE, interval=4, rare=2, restart=50)
    question = plan(costs=costs, goal=Goal(steps=15), job=replace(JOB, replicas=1, microbatches=4),
                    law="steps", steps=(10,), repair=20.0)
    outcome = play("balanced", question)
    assert outcome.rolled_back == 2
    assert outcome.seconds == pytest.approx(50 + 20 + 50 + 7 * 5)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_accounts_add_up(way: str) -> None:
    costs = Costs(interval=20, replica_restart=40, restart=60, memory_restart=30, save=2, stall=20, swap=10)
    question = plan(costs=costs, goal=Goal(seconds=50_000), mean=800.0 * JOB.gpus, repair=100.0, spares=1)
    outcome = play(way, question, 3)
    assert outcome.failures > 20
    assert outcome.alive_gpu_seconds <= outcome.seconds * JOB.gpus + 1e-6
    assert outcome.allocated_gpu_seconds == pytest.approx(50_000 * 9)
    assert 0 < outcome.tokens <= (outcome.committed - outcome.rolled_back) * JOB.tokens_per_step
    if WAYS[way](question).constant and outcome.replicas_left == JOB.replicas:
        assert outcome.tokens == pytest.approx((outcome.committed - outcome.rolled_back) * JOB.tokens_per_step)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_the_seed_says_everything(way: str) -> None:
    question = plan(goal=Goal(seconds=20_000), mean=500.0 * JOB.gpus, repair=50.0)
    assert play(way, question, 1) == play(way, question, 1) != play(way, question, 2)


# -- reports --------------------------------------------------------------------------------------------------------
def result(way: str, share: float, *, constant: bool = True, half: float = 0.001) -> Result:
    return Result(way, constant, Figure(share, half), Figure(share, half), None, None, 1.0, 0)


def test_what_is_recommended_holds_the_batch_and_ties_are_named() -> None:
    said = recommend([result("a", 0.9), result("b", 0.8995), result("c", 0.5), result("d", 0.99, constant=False)])
    assert said.startswith("a: 90.0 ± 0.1 %")
    assert "told from it with these seeds: b." in said
    assert "another batch than planned: d" in said
    assert "c" not in said.split("%", 1)[1].split("planned")[1]
    assert "None" in recommend([result("d", 0.9, constant=False)])


def test_hours_and_cost_are_those_of_the_tokens_asked_for() -> None:
    question = plan(goal=Goal(tokens=160_000, seconds=1e6))
    [row] = compare(question, ["balanced"], 2, 3.0, 160_000)
    assert row.hours is not None
    assert row.cost is not None
    assert row.hours.mean == pytest.approx(500 / 3600)
    assert row.cost.mean == pytest.approx(500 / 3600 * 8 * 3)
    [late] = compare(replace(question, goal=Goal(seconds=100)), ["balanced"], 2, 3.0, 160_000)
    assert late.hours is None


# -- published figures ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["paper-3d", "paper-hsdp", "ft-hsdp"])
def test_presets_come_near_what_was_published(name: str) -> None:
    rows = {row.what: row for row in PRESETS[name].rows(2)}
    assert all(row.got for row in rows.values())
    for row in rows.values():
        published = row.published.removesuffix(" %").lstrip("+")
        if published.replace(".", "").isdigit():
            assert float(row.got.split(" %")[0].lstrip("+")) == pytest.approx(float(published), abs=1.5), row


def test_the_paper_s_advantage_is_there_from_its_assumptions_only() -> None:
    """Negative control: with nothing lost between saves there is nearly nothing left of it."""
    from recover.simulate.cluster import presets

    fitted = presets.tokens_at(presets.PAPER_3D, 234, 15)
    assert presets.tokens_at(presets.PAPER_3D, 20, 15) < 1.2 < 1.7 < fitted


def test_the_command_prints_published_beside_ours() -> None:
    shown = CliRunner().invoke(app, ["simulate", "cluster", "--preset", "paper-3d", "--json"])
    assert shown.exit_code == 0
    [preset] = json.loads(shown.stdout)
    assert preset["rows"][0]["published"] == "+74.9 %"
    assert preset["rows"][0]["got"].startswith("+7")
    assert any("fitted" in line for line in preset["assumptions"])
    table = CliRunner().invoke(app, ["simulate", "cluster", "--preset", "paper-3d"], env={"COLUMNS": "160"})
    assert "published" in table.stdout
    assert "2.23x" in table.stdout


def test_the_command_compares_and_recommends() -> None:
    arguments = ["simulate", "cluster", "--days", "2", "--seeds", "2", "--mtbf", "5000", "--way", "balanced", "--way", "spares"]
    said = CliRunner().invoke(app, [*arguments, "--json"])
    assert said.exit_code == 0, said.output
    answer = json.loads(said.stdout)
    assert [row["way"] for row in answer["results"]] == ["balanced", "spares"]
    assert answer["recommendation"].startswith("balanced")
    assert CliRunner().invoke(app, [*arguments, "--json"]).stdout == said.stdout
    assert "Recommended: balanced" in CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize(("arguments", "said"), [
    (["--preset", "nothing"], "known are all, paper-3d"), (["--gpus", "100"], "multiple of --gpus-per-replica"),
    (["--way", "hope"], "known are balanced"), (["--law", "murphy"], "--law must be"), (["--seeds", "0"], "at least 1"),
    (["--microbatches", "3"], "raise B"), (["--repair", "-1"], "not negative"), (["--microbatches", "257"], "multiple of"),
])
def test_mistakes_are_explained(arguments: list[str], said: str) -> None:
    outcome = CliRunner().invoke(app, ["simulate", "cluster", "--days", "0.1", "--seeds", "1", *arguments])
    assert outcome.exit_code == 2
    assert said in outcome.output


def test_crusoe_counts_what_was_thrown_away() -> None:
    """Steps of 11 s after 9 s for new groups: a failure each 20.001 s lets one step through, each 19.9 s none."""
    job = Job(replicas=30, gpus_per_replica=10, microbatches=30, tokens_per_step=30, microbatch=10.0, reduction=1.0)
    for mean, share in ((20.001, 1.0), (19.9, 0.0)):
        question = plan(job=job, costs=replace(CRUSOE_COSTS, reform=9), goal=Goal(seconds=10_000), law="periodic", mean=mean,
                        repair=1.0)
        outcome = play("drop-and-shrink", question)
        assert outcome.committed == pytest.approx(share * outcome.failures, abs=2)
        assert outcome.discarded == pytest.approx(outcome.failures, abs=2)
