"""Backwards without autocast, whatever the device."""

from contextlib import nullcontext

import pytest
import torch

from penstock.runtime.without_autocast import without_autocast


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu"])
def test_autocast_of_the_accelerator_is_turned_off(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned_off: list[tuple[str, bool]] = []

    def autocast(device_type: str, enabled: bool) -> nullcontext[None]:
        turned_off.append((device_type, enabled))
        return nullcontext()

    with torch.autocast("cpu"), monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
        patch.setattr(torch, "is_autocast_enabled", lambda asked: asked == device_type)
        patch.setattr(torch, "autocast", autocast)
        with without_autocast():
            assert [(device_type, False)] == turned_off
