"""A managed state taken apart and put back is the same state, to the bit, and holds nothing that runs."""
from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch
from torch import nn

from recover.training.managed import Managed
from recover.training.state import Flat, copied, flatten, pack, restore, unpack

SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9 ** n),
    "multi": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 3]),
    "warm": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)], [2]),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True), "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2), "lbfgs": lambda p: torch.optim.LBFGS(list(p), max_iter=2),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, tied: bool = True) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight
        self.first.bias.requires_grad = False
        self.to(dtype)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


def made(optimizer="adamw", scheduler="lambda", seed=0, dtype=torch.float32, **model):
    torch.manual_seed(seed)
    net = Model(dtype, **model)
    tool = OPTIMIZERS[optimizer](p for p in net.parameters() if p.requires_grad)
    return Managed([net, tool, SCHEDULERS[scheduler](tool)])


def train(managed, steps=4):
    model, optimizer, scheduler = managed.models[0], managed.optimizers[0], managed.others[0]
    generator = torch.Generator().manual_seed(5)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator).to(next(model.parameters()).dtype)
        loss = optimizer.step(closure)
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([float(loss)] if plateau else []))


def through_json(flat: Flat) -> Flat:
    text = json.dumps(flat.values, allow_nan=False)
    return Flat(flat.tensors, json.loads(text))


CASES = [("adamw", s, torch.float32) for s in SCHEDULERS] + [(o, "lambda", torch.float32) for o in OPTIMIZERS] + [
    ("adamw", "lambda", torch.bfloat16)]


@pytest.mark.parametrize(("optimizer", "scheduler", "dtype"), CASES)
def test_what_is_put_back_goes_on_like_the_original(optimizer, scheduler, dtype):
    original = made(optimizer, scheduler, dtype=dtype)
    train(original)
    kept = through_json(copied(flatten(original)))
    digest = original.digest()
    train(original)                                                  # the copy is a copy
    other = made(optimizer, scheduler, seed=1, dtype=dtype)
    assert other.digest() != digest
    restore(other, kept)
    assert other.digest() == digest
    train(other)
    assert other.digest() == original.digest()


def test_putting_back_replaces_what_was_there():
    fresh = made()
    kept = copied(flatten(fresh))
    digest = fresh.digest()
    train(fresh)
    restore(fresh, through_json(kept))
    assert fresh.digest() == digest
    assert not fresh.optimizers[0].state


def test_parameters_are_written_in_place():
    managed = made()
    before = {name: tensor.data_ptr() for name, tensor in managed.named_tensors()}
    restore(managed, copied(flatten(made(seed=1))))
    assert {name: tensor.data_ptr() for name, tensor in managed.named_tensors()} == before


def test_tied_parameters_are_kept_once():
    assert "model/second.weight" not in flatten(made()).tensors
    assert "model/second.weight" in flatten(made(tied=False)).tensors


@pytest.mark.parametrize(("other", "said"), [
    (lambda: made(dtype=torch.bfloat16), "float32"), (lambda: made(tied=False), "second.weight is in the model only"),
    (lambda: made("sgd"), "SGD"), (lambda: made(scheduler="multi"), "MultiStepLR"),
    (lambda: regrouped(), "groups of AdamW")])
def test_what_does_not_fit_is_refused_before_anything_changes(other, said):
    managed = other()
    digest = managed.digest()
    with pytest.raises(ValueError, match=said):
        restore(managed, copied(flatten(made())))
    assert managed.digest() == digest


def regrouped():
    managed = made()
    group = managed.optimizers[0].param_groups[0]
    group["params"] = group["params"][::-1]
    return managed


@pytest.mark.parametrize("value", [
    {"a": [1, 2.5, -0.0, True, None, "x", (3, [4])], 5: {"b": b"\x00\xff"}}, {"x": math.inf, "y": -math.inf}, Counter({3: 2}),
    {"$tensor": "not one"}, {}, [], (), 2 ** 80, {"state": -2 ** 127}])
def test_trees(value):
    plain = json.loads(json.dumps(pack(value, "w", {}), allow_nan=False))
    back = unpack(plain, {})
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)                                 # -0.0, True and 1


def test_nan_and_tensors_in_trees():
    tensors: dict[str, torch.Tensor] = {}
    tree = {"a": [torch.ones(2), math.nan]}
    back = unpack(json.loads(json.dumps(pack(tree, "w", tensors))), tensors)
    assert list(tensors) == ["w/a/0"]
    assert torch.equal(back["a"][0], torch.ones(2))
    assert math.isnan(back["a"][1])


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), {"a": Odd()}, {(1, 2): 3}, {1.5: 2}, {1, 2}, torch.float32])
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(ValueError, match="can't be kept"):
        pack(value, "here", {})


@pytest.mark.parametrize("value", [{"$tensor": "gone"}, {"$pickle": "x"}, {"a": 1}])
def test_what_pack_never_makes_is_refused(value):
    with pytest.raises(ValueError, match="not a state"):
        unpack(value, {})


@pytest.mark.parametrize("values", [
    {}, {"models": 1, "optimizers": [], "others": 3}, {"models": 1, "optimizers": [{"type": "AdamW"}], "others": []}])
def test_values_of_no_state_are_refused(values):
    managed = made()
    with pytest.raises(ValueError, match="not a state"):
        restore(managed, Flat(flatten(managed).tensors, values))


def test_too_few_states_are_refused():
    flat = flatten(made())
    del flat.values["optimizers"][0]["states"][-1]
    with pytest.raises(ValueError, match="groups of AdamW"):
        restore(made(seed=1), flat)
