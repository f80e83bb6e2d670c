"""FSDP2 inside a replica: what `run.manage` sets, and when a microbatch's gradient is reduced over the replica's shards.

Theory of operation
-------------------
* The step's gradient is a sum over microbatches *and* data ranks, divided once by the global weight. So FSDP must sum and
  never average: divide factor 1, and sums only (with the factor alone Gloo is asked for PREMUL_SUM, which it lacks).
* Data ranks may use different parameters (mixtures of experts); FSDP reduces what has a gradient, and with different
  lists on two ranks a reduction of unequal sizes ends the process. Hence it is told to reduce unused ones too, as
  zeros. What was really used is then seen only on the *unsharded* parameters, where `touches` puts hooks.
* Every reduction is one reduce-scatter per module. When a step's sums need not be whole after each microbatch (`fast`, once
  firings are learned), the gradients of all but the last stay unsharded and are reduced with it: fewer collectives, for
  memory (unsharded gradients, and with `keep` parameters too, between microbatches of a step).
* `flush` reduces what was withheld though no backward follows; it does what torch's own pipelining does (`perform_reduce_grad`).
* Nothing of torch is replaced or wrapped. Two private attributes are read (`_get_fsdp_state`, and what `flush` walks);
  the tests run both.
* `torch.distributed.fsdp` is not imported here (it takes as long as half of torch): whoever uses FSDP has done so.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def modules_of(models: Iterable[nn.Module]) -> list[FSDPModule]:
    """Every module that `fully_shard` was applied to, outer ones first, each once."""
    library = sys.modules.get("torch.distributed.fsdp")
    found: dict[int, FSDPModule] = {}
    for model in models if library is not None else ():
        for module in model.modules():
            if isinstance(module, library.FSDPModule):          # type: ignore[union-attr]
                found.setdefault(id(module), module)
    return list(found.values())


def prepare(models: Iterable[nn.Module]) -> list[FSDPModule]:
    """Makes FSDP2 sum instead of average, and reduce unused parameters; gives the modules concerned (none: no FSDP).

    Raises ValueError for models in DistributedDataParallel or the first FSDP.
    """
    models = list(models)
    for model in models:
        for name, module in model.named_modules():
            _refuse(name or "the model", module)
    found = modules_of(models)
    for module in found:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):     # torch before 2.13 has no remedy for uneven use
            module.set_reduce_scatter_unused_params(True, recurse=False)
    return found


def _refuse(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(f"{name} is wrapped in DistributedDataParallel: give run.manage the plain model; the run sums the "
                         "gradients over replicas itself, and `fully_shard` does it inside one")
    library = sys.modules.get("torch.distributed.fsdp")
    if library is not None and isinstance(module, library.FullyShardedDataParallel):
        raise ValueError(f"{name} is wrapped in FullyShardedDataParallel, which keeps gradients in flat parameters of its "
                         'own: use torch.distributed.fsdp.fully_shard(model, mesh=run.mesh["dp_shard"]) instead')


def sharded(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that FSDP reduces: give them to `GradientStore.track`."""
    found: dict[int, nn.Parameter] = {}
    for module in modules_of(models):
        for group in _groups(module):
            for each in group.fsdp_params:
                found.setdefault(id(each.sharded_param), each.sharded_param)
    return list(found.values())


def watch(models: Iterable[nn.Module], touches: Mapping[int, Callable[[Tensor], None]]) -> Callable[[], None]:
    """Calls `touches[id(sharded parameter)]` when this rank's backward uses it. Gives what removes the hooks.

    All ranks of the mesh at once: each module's parameters are gathered once, since only then the unsharded ones exist.
    """
    handles = []
    for module in modules_of(models):
        module.unshard()
        for group in _groups(module):
            for each in group.fsdp_params:
                touch = touches.get(id(each.sharded_param))
                if touch is not None:
                    handles.append(each.unsharded_param.register_post_accumulate_grad_hook(touch))
        module.reshard()

    def remove() -> None:
        for handle in handles:
            handle.remove()
    return remove


def sync(models: Iterable[nn.Module], last: bool, *, keep: bool = True) -> None:
    """Before a microbatch's forward: whether its backward reduces the gradients (`last`) or withholds them.

    keep: parameters stay unsharded until the last backward, which saves gathering them for every microbatch.
    """
    for module in modules_of(models):
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last or not keep, recurse=False)
        module.set_is_last_backward(last)


def flush(models: Iterable[nn.Module]) -> None:
    """Reduces what was withheld, on all ranks of the mesh at once. Inside `GradientStore.flush`.

    Also after each backward of a pipeline's stage in `exact` (torch's stages withhold until the end of a chunk).
    """
    models = list(models)
    sync(models, True)
    for module in modules_of(models):
        state: Any = module._get_fsdp_state()
        if state._is_root:                              # known once a forward has run
            for each in state._state_ctx.all_states:
                for group in _groups_of(each):
                    group.post_backward()
            state._root_post_backward_final_callback()


def reshard(models: Iterable[nn.Module]) -> None:
    """Frees unsharded parameters: an outermost module keeps its own after a forward without backward (evaluation)."""
    for module in modules_of(models):
        module.reshard()


def _groups(module: FSDPModule) -> list[Any]:
    return _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    """Of parameters that are gathered together; torch before 2.13 has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return list(groups)
