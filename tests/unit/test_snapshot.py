"""The managed state in a form that travels: equal bits there, nothing unpickled, nothing believed."""
from __future__ import annotations

import math

import msgspec
import pytest
import torch
from torch import nn

from recover.training import snapshot
from recover.training.managed import Managed


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), amsgrad=True, foreach=False)


OPTIMIZERS = {"adamw": adamw, "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
              "adagrad": lambda m: torch.optim.Adagrad(m.parameters()), "lbfgs": lambda m: torch.optim.LBFGS(m.parameters())}


def make(seed, optimizer="adamw", dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 3)).to(dtype)
    if optimizer != "lbfgs":                            # it can't take strides of another order
        model[0].to(memory_format=torch.channels_last)
    model[3].bias.requires_grad = False
    chosen = OPTIMIZERS[optimizer](model)
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(chosen, [2, 4]),
                  torch.optim.lr_scheduler.LambdaLR(chosen, lambda n: 1 / (n + 1))] if optimizer == "sgd" else []
    return model, chosen, *schedulers


def train(objects, steps, seed=0):
    model, optimizer, *schedulers = objects
    for step in range(steps):
        torch.manual_seed(seed + step)
        x = torch.randn(4, 3, 4, 4, dtype=model[0].weight.dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_receiver_goes_on_with_equal_bits(optimizer, steps, dtype):
    if dtype == torch.bfloat16 and optimizer == "lbfgs":
        pytest.skip("not for 16 bits")
    one, two = make(1, optimizer, dtype), make(2, optimizer, dtype)
    train(one, steps)
    train(two, 2, seed=50)                              # what it has is replaced, or taken away
    store = {"learned": {"fires": [1, 2], "order": [2, 1]}, "exponents": [3, -4]}
    given = snapshot.take(steps, Managed(one), store)
    assert snapshot.load(snapshot.read_head(given.head), given.data, Managed(two)) == store
    assert Managed(one).digest() == Managed(two).digest()
    assert snapshot.take(steps, Managed(two), store).digest() == given.digest()
    train(one, 2, seed=9)
    train(two, 2, seed=9)
    assert Managed(one).digest() == Managed(two).digest()


def test_bits_of_odd_numbers_survive():
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = torch.tensor([[math.nan, -0.0, math.inf, 1e-45]])
    other = nn.Linear(4, 1, bias=False)
    given = snapshot.take(0, Managed([model]), None)
    snapshot.load(snapshot.read_head(given.head), given.data, Managed([other]))
    assert torch.equal(other.weight.view(torch.int32), model.weight.view(torch.int32))


def test_a_copy_is_not_changed_by_what_comes_later():
    one = make(1)
    given = snapshot.take(0, Managed(one), None)
    before = given.digest()
    train(one, 1)
    assert given.digest() == before
    assert snapshot.take(1, Managed(one), None).digest() != before


class Odd:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_functions_stay_where_they_are():
    model = nn.Linear(2, 2)
    mine, theirs = Odd({"f": len, "n": (1, b"x", [2.5, None])}), Odd({"f": max, "n": (0, b"", [0.0, 1])})
    given = snapshot.take(0, Managed([model, mine]), None)
    snapshot.load(snapshot.read_head(given.head), given.data, Managed([nn.Linear(2, 2), theirs]))
    assert theirs.state == {"f": max, "n": (1, b"x", [2.5, None])}
    assert type(theirs.state["n"]) is tuple


def test_state_that_can_not_travel_is_named():
    with pytest.raises(ValueError, match=r"a builtins\.set can.t be kept"):
        snapshot.take(0, Managed([nn.Linear(2, 2), Odd({"x": {1, 2}})]), None)


def test_another_model_is_refused():
    given = snapshot.take(0, Managed([nn.Linear(2, 2)]), None)
    with pytest.raises(ValueError, match=r"weight is \(3, 2\)"):
        snapshot.load(snapshot.read_head(given.head), given.data, Managed([nn.Linear(2, 3)]))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("change", [("model/bias", "float32", [-2, -2]), ("model/bias", "load", [2]), ("model/bias", "nn", [2]),
                                    ("model/weight", "float32", [2, 2]), ("model/bias", "float64", [20, 2])])
def test_a_header_is_not_believed(change, place):
    given = snapshot.take(0, Managed([nn.Linear(2, 2)]), None)
    head = snapshot.read_head(given.head)
    head.tensors[place:] = [change] if place else [change, change]
    with pytest.raises(ValueError, match="a snapshot"):
        snapshot.read_head(msgspec.msgpack.encode(head))


def test_memory_made_ready_is_used_if_it_is_large_enough():
    objects = make(1)
    train(objects, 1)
    managed = Managed(objects)
    room = torch.full((snapshot.size_of(managed),), 255, dtype=torch.uint8)
    given = snapshot.take(1, managed, None, room)
    assert given.data.data_ptr() == room.data_ptr()
    assert given.digest() == snapshot.take(1, managed, None).digest()
    small = torch.empty(10, dtype=torch.uint8)
    assert snapshot.take(1, managed, None, small).digest() == given.digest()


@pytest.mark.parametrize("junk", [b"", b"\x93\x01\x02\x03", b"\x91" * 5000])
def test_junk_is_no_header(junk):
    with pytest.raises(ValueError, match="not the header"):
        snapshot.read_head(junk)
