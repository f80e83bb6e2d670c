"""Memory of buckets that serves again, and a layout that takes it over."""
from __future__ import annotations

import torch
from torch import nn

from recover.gradients.buckets import Memory
from recover.gradients.layout import Learned
from recover.gradients.store import GradientStore

CPU = torch.device("cpu")


def inside(tensor, flat):
    start = flat.untyped_storage().data_ptr()
    return start <= tensor.data_ptr() < start + flat.untyped_storage().nbytes()


def test_what_was_given_serves_again():
    memory = Memory(keep=True)
    first = memory.zeros(100, torch.float32, CPU).fill_(7)
    memory.rewind()
    parts = [memory.zeros(n, dtype, CPU) for n, dtype in ((10, torch.float64), (3, torch.float32), (40, torch.float32))]
    assert inside(parts[0], first)
    assert inside(parts[1], first)
    assert not inside(memory.zeros(200, torch.float32, CPU), first)
    assert all(not part.any() and part.data_ptr() % 64 == first.data_ptr() % 64 for part in parts)
    parts[0].fill_(1), parts[1].fill_(2), parts[2].fill_(3)
    assert [sorted(set(part.tolist())) for part in parts] == [[1], [2], [3]]      # none lies in another


def test_without_keep_nothing_serves_again():
    memory = Memory()
    first = memory.zeros(100, torch.float32, CPU)
    memory.rewind()
    assert not inside(memory.zeros(10, torch.float32, CPU), first)


def test_a_store_that_begins_with_another_layout_keeps_its_memory():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    store = GradientStore(list(model.named_parameters()), microbatches=2, bucket_bytes=600, first_bucket_bytes=100,
                          memory=Memory(keep=True))
    before = [bucket.reduced for bucket in store.buckets] + [bucket.local for bucket in store.buckets]
    for flat in before:
        flat.fill_(5)
    count = len(list(model.parameters()))
    store.begin_with(Learned(fires=[1] * count, order=list(range(count))))
    after = [flat for bucket in store.buckets for flat in (bucket.local, bucket.reduced)]
    assert sum(any(inside(flat, old) for old in before) for flat in after) >= len(after) - 1
    assert all(not flat.any() for flat in after)
    for n, flat in enumerate(after):
        flat.fill_(n)
    assert all(bool((flat == n).all()) for n, flat in enumerate(after))
    store.close()
