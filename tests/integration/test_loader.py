"""Batches from worker processes: the same bits as in process, whatever was guessed, whatever the plan does."""
import logging
import multiprocessing
import os
import random
import signal

import numpy as np
import psutil
import pytest
import torch

from recover.errors import RecoverError
from recover.training.loader import PREFETCH, Loader, WorkerLost
from recover.training.sampling import Microbatch, Sampler, Samples, seed_everything

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60),
              pytest.mark.filterwarnings("ignore:This DataLoader will create")]      # more workers than cores

B, BATCH, LENGTH = 8, 3, 100
SAMPLER = Sampler(LENGTH, 4, B, BATCH)


class Augmented:
    """Items with noise from all three generators; says which process made it."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + torch.from_numpy(np.random.rand(4)).float()
        return index + noise, os.getpid()


def expected(microbatch):
    return Samples(Augmented(), SAMPLER)[microbatch][0]


def by_worker(made):
    return bool((made[1] != os.getpid()).all())


@pytest.fixture
def loader():
    loaders = []

    def make(plan, num_workers=2, dataset=None, **options):
        loaders.append(Loader(dataset or Augmented(), BATCH, num_workers, sampler=SAMPLER, plan=plan, **options))
        return loaders[-1]

    yield make
    for each in loaders:
        each.close()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_any_number_of_workers_gives_the_same_bits(loader, num_workers):
    data = loader(lambda step: (1, 2, 5), num_workers)
    for step in range(4):
        for index in (1, 2, 5):
            made = data[Microbatch(step, index)]
            assert torch.equal(made[0], expected(Microbatch(step, index)))
            assert by_worker(made) == bool(num_workers)         # a plan that holds is guessed without a miss


def test_an_unplanned_microbatch_is_made_in_process_with_the_same_bits(loader):
    data = loader(lambda step: (0, 1))
    for index, worker in ((0, True), (6, False), (1, True), (7, False)):
        made = data[Microbatch(0, index)]
        assert torch.equal(made[0], expected(Microbatch(0, index)))
        assert by_worker(made) == worker
    assert by_worker(data[Microbatch(1, 0)])


def test_the_order_of_asking_changes_nothing(loader):
    names = [Microbatch(step, index) for step in range(2) for index in range(B)]
    random.Random(1).shuffle(names)
    data = loader(lambda step: range(B))
    for name in [*names, *names]:                               # the second time they have been asked for already
        assert torch.equal(data[name][0], expected(name))


def test_the_plan_changes_midway(loader):
    plan = {"now": (0, 1, 2)}
    data = loader(lambda step: plan["now"])
    made = [data[Microbatch(0, i)] for i in (0, 1)]
    plan["now"] = (4, 5, 6, 7)                                  # a failure: others, and more of them
    made += [data[Microbatch(0, i)] for i in (2, 6)]            # the one in hand was guessed, the lost one was not
    assert [by_worker(m) for m in made] == [True, True, True, False]
    late = [[by_worker(data[Microbatch(step, i)]) for i in plan["now"]] for step in (1, 2, 3)]
    assert all(late[1] + late[2])                               # wrong guesses are gone, and the new plan is guessed
    for step in (1, 2):
        plan["now"] = (step, 3)                                 # again at each step
        for i in plan["now"]:
            assert torch.equal(data[Microbatch(3 + step, i)][0], expected(Microbatch(3 + step, i)))


def test_wrong_guesses_stay_bounded_whatever_the_plan_does(loader):
    draw, plan = random.Random(2), {}
    data = loader(lambda step: plan.get(step, (0,)))
    for step in range(12):
        for ahead in range(step, step + 8):
            plan[ahead] = sorted(draw.sample(range(B), draw.randint(0, 3)))
        asked = draw.sample(range(B), 3)
        for index in asked:
            name = Microbatch(step, index)
            assert torch.equal(data[name][0], expected(name))
            assert len(data._guesses.ahead) <= 2 * PREFETCH
            assert len(data._kept) <= 2 * PREFETCH
            assert len(data._guesses.known) <= 3 * B
            assert name not in data._guesses.ahead              # nobody makes again what was asked for
            assert all(kept.step >= step for kept in data._kept)


def test_what_is_skipped_is_kept_but_not_without_limit(loader):
    data = loader(lambda step: range(B))
    for index in (3, 7, 0, 6):                                  # 3 skips three, 7 skips three more: one too many
        made = data[Microbatch(0, index)]
        assert torch.equal(made[0], expected(Microbatch(0, index)))
        assert len(data._kept) <= 2 * PREFETCH
    assert by_worker(made)
    data[Microbatch(1, 0)]
    assert all(kept.step >= 1 for kept in data._kept)           # what is over is dropped


def test_no_quota_for_a_while_and_then_some(loader):
    data = loader(lambda step: (3, 4) if step == 0 or step >= 5 else ())
    assert by_worker(data[Microbatch(0, 3)])
    assert by_worker(data[Microbatch(0, 4)])
    late = [data[Microbatch(step, i)] for step in (5, 6, 7) for i in (3, 4)]
    assert all(by_worker(made) for made in late[2:])
    assert torch.equal(late[0][0], expected(Microbatch(5, 3)))


def test_the_script_s_random_state_is_left_alone(loader):
    def draws(num_workers):
        data = loader(lambda step: (0,), num_workers)
        seed_everything(1, 2, 3)
        data[Microbatch(0, 0)]
        data[Microbatch(0, 5)]
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    assert draws(0) == draws(2)


class Faulty(Augmented):
    """Item 17 is broken everywhere; in a worker, so is item 23."""

    def __getitem__(self, index):
        if index == 17 or (index == 23 and multiprocessing.parent_process() is not None):
            raise KeyError(f"item {index} is broken")
        return super().__getitem__(index)


def holder(item):
    return next(m for step in range(4) for i in range(B) if item in (m := Microbatch(step, i)).samples(SAMPLER))


def test_a_dataset_s_error_comes_up_when_its_microbatch_is_asked_for(loader):
    bad = holder(17)
    data = loader(lambda step: range(B), dataset=Faulty())
    for step in range(bad.step + 1):
        for index in range(B):
            name = Microbatch(step, index)
            if name == bad:
                with pytest.raises(KeyError, match="item 17 is broken"):
                    data[name]
            else:
                assert torch.equal(data[name][0], expected(name))


def test_a_worker_s_own_error_is_made_up_for_and_said_once(loader, caplog):
    bad = holder(23)
    data = loader(lambda step: range(B), dataset=Faulty())
    with caplog.at_level(logging.WARNING):
        for index in range(B):
            name = Microbatch(bad.step, index)
            assert torch.equal(data[name][0], expected(name))
    assert sum("item 23 is broken" in record.getMessage() for record in caplog.records) == 1


class Suicidal(Augmented):
    """A worker that makes item `victim` is killed."""

    victim = Microbatch(1, 0).samples(SAMPLER)[0]

    def __getitem__(self, index):
        if index == self.victim and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")     # the signal may hit a destructor
def test_a_worker_s_death_is_a_clear_error(loader):
    data = loader(lambda step: range(B), num_workers=1, dataset=Suicidal())

    def ask():
        for index in range(B):
            data[Microbatch(0, index)]
        data[Microbatch(1, 0)]

    with pytest.raises((WorkerLost, RuntimeError), match=r"worker.*(died|killed|exited unexpectedly)"):
        ask()
    assert issubclass(WorkerLost, RecoverError)


def test_close_ends_the_workers_and_may_be_called_twice(loader):
    before = set(psutil.Process().children())
    with loader(lambda step: (0,)) as data:
        data[Microbatch(0, 0)]
        workers = set(psutil.Process().children()) - before
        assert len(workers) == 2
        data[Microbatch(1, 0)]
        assert set(psutil.Process().children()) - before == workers     # the same ones at every step
    assert not [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]
    data.close()
    with pytest.raises(RuntimeError, match="closed"):
        data[Microbatch(2, 0)]


def test_own_collate_is_used_in_workers_and_in_process(loader):
    data = loader(lambda step: (0,), dataset=range(LENGTH), collate_fn=tuple)
    for name in (Microbatch(0, 0), Microbatch(0, 1)):
        assert data[name] == name.samples(SAMPLER)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="batch_size is 4 here and 3 in the sampler"):
        Loader(Augmented(), 4, sampler=SAMPLER, plan=lambda step: ())
    with pytest.raises(ValueError, match="not -1"):
        Loader(Augmented(), BATCH, -1, sampler=SAMPLER, plan=lambda step: ())
