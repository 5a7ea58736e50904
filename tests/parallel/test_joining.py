"""The device of a process, if the caller names none."""

import pytest
import torch
import torch.distributed as dist

from penstock.parallel.joining import choose_device


@pytest.mark.parametrize(
    ("found", "num_devices", "expected"),
    [
        (None, 0, "cpu"),
        ("cuda", 2, "cuda:1"),
        ("xpu", 2, "xpu:1"),
        ("mps", 2, "cpu"),  # torch has only gloo for it.
        ("maia", 2, "cpu"),  # torch knows no backend.
        ("xpu", 1, "cpu"),  # There is none for the other process.
    ],
)
def test_accelerator_is_chosen_if_torch_has_a_backend_of_its_own(
    found: str | None, num_devices: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    device = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torch.device(expected) == choose_device()
    assert ([1] if ":" in expected else []) == chosen


def test_default_backends_of_torch_are_as_assumed() -> None:
    assert "gloo" == dist.get_default_backend_for_device("mps")
    assert "xccl" == dist.get_default_backend_for_device("xpu")
