"""Addressing, shuffling and seeding: pure, exactly once per epoch, and random enough."""
import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recover.training import sampling
from recover.training.sampling import (
    Microbatch,
    Permutation,
    Sampler,
    Samples,
    digest,
    preserved_random_state,
    seed_everything,
)


def whole(length, seed=0, epoch=0):
    permutation = Permutation(length, seed, epoch)
    return [permutation[i] for i in range(length)]


def off(observed, expected, freedom):
    """By how many standard deviations chi-squared is off."""
    chi = sum((n - expected) ** 2 / expected for n in observed)
    return abs(chi - freedom) / math.sqrt(2 * freedom)


# -- permutations ------------------------------------------------------------------------------------------------------
def test_bijective_for_every_small_length():
    for length in range(1, 200):
        for epoch in range(2):
            assert sorted(whole(length, 5, epoch)) == list(range(length))


@pytest.mark.parametrize("length", [255, 256, 257, 1000, 1023, 1024, 1025, 4093])
def test_bijective_around_squares_and_primes(length):
    assert sorted(whole(length)) == list(range(length))


def test_random_access_into_what_no_memory_could_hold():
    permutation = Permutation(10**15, 1, 2)
    images = [permutation[i] for i in range(1000)]
    assert len(set(images)) == 1000
    assert all(0 <= image < 10**15 for image in images)
    held = vars(permutation).values()
    assert sum(len(v) if isinstance(v, list) else 1 for v in held) < 50


def test_every_order_of_few_items_is_equally_likely():
    for length in (2, 3, 4, 5):
        orders = math.factorial(length)
        count = Counter(tuple(whole(length, 7, epoch)) for epoch in range(30 * orders))
        assert off([*count.values(), *[0] * (orders - len(count))], 30, orders - 1) < 4


def test_too_few_rounds_are_found_out(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(sampling, "ROUNDS", 2)
    with pytest.raises(AssertionError):
        test_every_order_of_few_items_is_equally_likely()


@pytest.mark.parametrize("length", [37, 101, 1024])
def test_an_item_goes_anywhere_and_neighbours_part(length):
    epochs = 40_000 // length
    shuffles = [whole(length, 3, epoch) for epoch in range(epochs)]
    size = Counter(item * 8 // length for item in range(length))
    where = Counter((item * 8 // length, image * 8 // length)
                    for shuffle in shuffles for item, image in enumerate(shuffle))
    for a in size:
        for b in size:
            expected = epochs * size[a] * size[b] / length
            assert abs(where[a, b] - expected) < 5 * math.sqrt(expected)
    close = sum(abs(a - b) == 1 for shuffle in shuffles for a, b in itertools.pairwise(shuffle))
    expected = epochs * 2 * (length - 1) / length
    assert abs(close - expected) < 4 * math.sqrt(expected)


def test_seeds_and_epochs_shuffle_differently():
    shuffles = [tuple(whole(50, seed, epoch)) for seed in (-1, 0, 1, 2**70) for epoch in range(3)]
    assert len(set(shuffles)) == 12


def test_shuffles_are_the_same_for_ever():
    assert whole(10, 0, 0) == whole(10, 0, 0) == PINNED
    assert whole(10, np.int64(0), 0) == PINNED


PINNED = [3, 4, 9, 6, 1, 0, 7, 2, 5, 8]


def test_outside_is_an_error():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Permutation(0, 0, 0)
    for index in (-1, 3):
        with pytest.raises(IndexError, match="outside a permutation of 3"):
            Permutation(3, 0, 0)[index]


# -- addressing --------------------------------------------------------------------------------------------------------
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.integers(0, 2**40))
def test_each_epoch_holds_every_item_once(microbatches, batch_size, more, seed):
    sampler = Sampler(microbatches * batch_size + more, seed, microbatches, batch_size)
    steps = -(-3 * sampler.length // (microbatches * batch_size))
    order = [item for step in range(steps) for index in range(microbatches)
             for item in Microbatch(step, index).samples(sampler)]
    if sampler.length >= 20:
        assert order[:20] != order[sampler.length:sampler.length + 20]
    for epoch in range(3):
        assert sorted(order[epoch * sampler.length:(epoch + 1) * sampler.length]) == list(range(sampler.length))


def test_far_steps_cost_no_more_than_near_ones():
    sampler = Sampler(10**12, 0, 64, 8)
    items = sampler.samples(Microbatch(10**12, 63))
    assert len(items) == len(set(items)) == 8
    assert items == sampler.samples(Microbatch(10**12, 63))


def test_a_dataset_shorter_than_a_step_is_refused():
    assert Sampler(12, 0, 4, 3).samples(Microbatch(0, 3))
    with pytest.raises(ValueError, match=r"has 11 samples, but one step takes 12 \(4 microbatches of 3\)"):
        Sampler(11, 0, 4, 3)
    with pytest.raises(ValueError, match="at least 1, not 0 and 3"):
        Sampler(11, 0, 0, 3)


@pytest.mark.parametrize("microbatch", [Microbatch(-1, 0), Microbatch(0, -1), Microbatch(0, 4)])
def test_no_such_microbatch(microbatch):
    with pytest.raises(ValueError, match="no microbatch"):
        microbatch.samples(Sampler(12, 0, 4, 3))


def test_a_microbatch_is_a_name():
    assert {Microbatch(1, 2): "x"}[Microbatch(1, 2)] == "x"
    assert sorted([Microbatch(1, 0), Microbatch(0, 3)]) == [Microbatch(0, 3), Microbatch(1, 0)]
    with pytest.raises(AttributeError):
        Microbatch(1, 2).step = 3


# -- seeding -----------------------------------------------------------------------------------------------------------
def draws():
    return (torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist())


def seeded(*words):
    seed_everything(*words)
    return draws()


def test_equal_words_give_equal_draws_in_all_three_generators():
    first = seeded(1, 2, 3)
    draws()
    for a, b, c in zip(first, seeded(1, 2, 3), seeded(1, 2, 4), strict=True):
        assert a == b
        assert a != c


def test_every_word_counts_and_an_index_is_not_its_name():
    states = [seeded(*words)[part] for part in (0, 1, 2)
              for words in ((1, 2, 3), (2, 1, 3), (1, 3, 2), (12, 3, 3), (1, 23, 3), (1, 2, "3"), (1, 2, "commit"),
                            (2**80, 2, 3), (-1, 2, 3))]
    assert len({str(state) for state in states}) == 27
    assert digest(1, 23) != digest(12, 3)
    assert digest(np.int32(7), "a") == digest(7, "a")


def test_the_random_state_is_put_back_also_after_an_error():
    before = seeded(1, 1, 1)
    seed_everything(1, 1, 1)
    with pytest.raises(ValueError, match="no seed"), preserved_random_state():
        random.seed(5), np.random.seed(5), torch.manual_seed("no seed")
    assert draws() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_seeded_and_put_back_too():
    torch.rand(1, device="cuda")
    seed_everything(1, 1, 1)
    first = torch.rand(3, device="cuda").tolist()
    seed_everything(1, 1, 1)
    with preserved_random_state():
        seed_everything(5, 5, 5)
        assert torch.rand(3, device="cuda").tolist() != first
    assert torch.rand(3, device="cuda").tolist() == first


# -- batches -----------------------------------------------------------------------------------------------------------
class Augmented:
    """Items with noise from all three generators."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((2,), float(index)) + torch.rand(2), random.random() + np.random.rand()


def test_batches_are_a_pure_function_and_leave_no_trace():
    samples = Samples(Augmented(), Sampler(40, 9, 4, 3))
    before = seeded(1, 1, 1)
    seed_everything(1, 1, 1)
    x, noise = samples[Microbatch(2, 1)]
    assert draws() == before
    assert x.shape == (3, 2)
    samples[Microbatch(0, 0)]
    again, noise_again = samples[Microbatch(2, 1)]
    assert torch.equal(x, again)
    assert torch.equal(noise, noise_again)
    assert x.floor()[:, 0].int().tolist() == list(Microbatch(2, 1).samples(samples.sampler))


def test_augmentation_differs_between_microbatches_and_from_dropout():
    class Noise(Augmented):
        def __getitem__(self, index):
            return torch.rand(1)

    samples = Samples(Noise(), Sampler(40, 9, 4, 1))
    values = [samples[Microbatch(step, index)].item() for step in range(3) for index in range(4)]
    seed_everything(9, 0, 0)
    assert len({*values, torch.rand(1).item()}) == 13


def test_own_collate_and_lengths_that_do_not_fit():
    samples = Samples(range(40), Sampler(40, 9, 4, 3), collate=tuple)
    assert samples[Microbatch(0, 0)] == Microbatch(0, 0).samples(samples.sampler)
    with pytest.raises(ValueError, match="has 40 samples, its sampler was made for 41"):
        Samples(range(40), Sampler(41, 9, 4, 3))


def test_one_thread_within_the_fetch_as_many_as_before_after_it():
    class Threads(Augmented):
        def __getitem__(self, index):
            return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert Samples(Threads(), Sampler(40, 0, 1, 2))[Microbatch(0, 0)].tolist() == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
