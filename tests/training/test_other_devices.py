"""The memory of a device that is neither the CPU nor of CUDA, with torch's answers replaced."""

import pytest
import torch

from penstock.errors import OptionError
from penstock.training.forecast import Forecast, RankMemory, check_fits
from penstock.training.gpt_sizes import SIZES
from penstock.training.settings import TrainConfig
from penstock.training.watching import peak_memory

XPU = torch.device("xpu", 0)


def test_peak_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {XPU: 1234}
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", counts.__getitem__)
    assert 1234 == peak_memory(XPU)


def test_training_must_fit_what_the_device_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {XPU: (1000, 2000)}
    monkeypatch.setattr(torch.accelerator, "get_memory_info", free.__getitem__)
    config = TrainConfig(SIZES["tiny"])
    check_fits(config, Forecast((RankMemory(250, 250, 250, 250),), None), XPU)
    with pytest.raises(OptionError, match="but its device has 1000 B free"):
        check_fits(config, Forecast((RankMemory(250, 250, 250, 251),), None), XPU)
