"""Which compiled models `exact` refuses. Nothing is compiled here: torch.compile only takes notes until the first call."""
import pytest
import torch
from torch import nn

from recover.training.compiled import refuse_measured


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_default_modes_pass() -> None:
    model = plain()
    model[0].compile()
    refuse_measured([plain(), model, torch.compile(plain()), torch.compile(plain(), backend="eager"),
                     torch.compile(plain(), mode="reduce-overhead")])


@pytest.mark.parametrize("how", [dict(mode="max-autotune"), dict(mode="max-autotune-no-cudagraphs"),
                                 dict(options={"max_autotune_gemm": True})])
def test_measured_kernels_are_refused(how) -> None:
    with pytest.raises(ValueError, match=r'reduction="exact" needs the same kernels.*max_autotune'):
        refuse_measured([torch.compile(plain(), **how)])
    model = plain()
    model[1].compile(**how)
    with pytest.raises(ValueError, match=r"but 1 is compiled with max_autotune"):
        refuse_measured([model])


def test_the_global_setting(monkeypatch) -> None:
    import torch._inductor.config as config
    monkeypatch.setattr(config, "max_autotune", True)
    with pytest.raises(ValueError, match="but everything is compiled with max_autotune"):
        refuse_measured([plain()])
