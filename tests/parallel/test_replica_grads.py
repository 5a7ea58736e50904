"""Gradients are averaged with those of pipelines that run apart."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, init_device_mesh

import penstock
from limits import HANG_S
from penstock.errors import GradientError
from penstock.parallel import average_grads
from spread_models import Decoder, make_batch, make_decoder, on_cut_ranks, whole_step

Pipe = penstock.ParallelModel


class Pair:
    """An average over two pipelines, each of which calls `allreduce` in the same order."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=HANG_S)
        self.tensors: list[Tensor] = []
        self.lock = threading.Lock()
        self.calls = 0

    def allreduce(self, tensor: Tensor) -> "Started":
        return Started(self, tensor)


class Started:
    """A reduction that happens when both pipelines wait for it."""

    def __init__(self, pair: Pair, tensor: Tensor) -> None:
        self.pair, self.tensor = pair, tensor

    def wait(self) -> None:
        pair = self.pair
        with pair.lock:
            pair.tensors.append(self.tensor)
        if pair.barrier.wait() == 0:
            mean = sum(pair.tensors) / 2
            for tensor in pair.tensors:
                tensor.copy_(mean)
            pair.tensors.clear()
            pair.calls += 1
        pair.barrier.wait()


class Nothing:
    def wait(self) -> None:
        pass


def unchanged(tensor: Tensor) -> Nothing:
    return Nothing()


def grads_of(pipe: Pipe) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("is_tied", [False, True])
def test_two_pipelines_get_the_mean_of_their_gradients(is_tied: bool) -> None:
    pairs = [Pair(), Pair()]
    found: list[list[dict[str, Tensor]]] = [[], []]
    whole = [make_decoder(is_tied=is_tied) for _ in range(2)]

    def train(replica: int) -> None:
        tokens, target = make_batch(replica)

        def run(pipe: Pipe) -> dict[str, Tensor]:
            pipe.step(tokens, target=target)
            average_grads(pipe, pairs[pipe.rank].allreduce)
            return grads_of(pipe)

        found[replica] = on_cut_ranks(2, run, whole[replica])

    threads = [threading.Thread(target=train, args=(replica,)) for replica in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for replica, model in enumerate(whole):
        whole_step(model, *make_batch(replica))
    first, second = (dict(model.named_parameters()) for model in whole)
    assert [2, 2] == [pair.calls for pair in pairs]  # One for each stage of a rank.
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name, grad in one.items():
            assert torch.equal(grad, other[name])
            key = "embedding.weight" if is_tied and name == "head.weight" else name
            mean = (first[key].grad + second[key].grad) / 2
            torch.testing.assert_close(grad, mean, rtol=0, atol=1e-12)


def test_gradients_of_several_dtypes_are_averaged_apart() -> None:
    def run(pipe: Pipe) -> tuple[Counter[torch.dtype], bool]:
        dtypes: list[torch.dtype] = []

        def allreduce(tensor: Tensor) -> Nothing:
            dtypes.append(tensor.dtype)
            tensor *= 2
            return Nothing()

        for number, parameter in enumerate(pipe.parameters()):
            parameter.data = parameter.data.to(torch.float32 if number % 2 else torch.float64)
            parameter.grad = torch.full_like(parameter, number)
        average_grads(pipe, allreduce)
        grads = [parameter.grad for parameter in pipe.parameters()]
        return Counter(dtypes), all(torch.all(grad == 2 * i) for i, grad in enumerate(grads))

    expected = {torch.float32: 2, torch.float64: 2}  # One of each for each stage.
    assert [(expected, True)] == on_cut_ranks(1, run, make_decoder(is_tied=False))


def test_frozen_parameters_are_left_out() -> None:
    tokens, target = make_batch()
    model = make_decoder(is_tied=False)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    sizes: list[int] = []

    def run(pipe: Pipe) -> None:
        def allreduce(tensor: Tensor) -> Nothing:
            sizes.append(tensor.numel())
            return Nothing()

        pipe.step(tokens, target=target)
        average_grads(pipe, allreduce)

    on_cut_ranks(1, run, model)
    assert [model.embedding.weight.numel(), model.head.weight.numel()] == sizes


def test_each_rank_averages_its_own_part_of_a_sharded_gradient() -> None:
    is_own = not dist.is_initialized()  # A Trainer of transformers leaves one behind.
    if is_own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "pp"))
        x = torch.randn(4, 3)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        pipe = penstock.parallelize(model, x, loss_fn=nn.functional.mse_loss, mesh=mesh)
        pipe.step(x, target=x)
        before = {name: grad.full_tensor() for name, grad in grads_of(pipe).items()}

        def allreduce(tensor: Tensor) -> Nothing:
            assert type(tensor) is Tensor
            tensor *= 3
            return Nothing()

        average_grads(pipe, allreduce)
        after = grads_of(pipe)
        assert 4 == len(after)
        for name, grad in after.items():
            assert type(grad) is DTensor
            assert torch.equal(3 * before[name], grad.full_tensor())
        pipe.close()
    finally:
        if is_own:
            dist.destroy_process_group()


def refused(change: Any, model: Decoder | None = None, **options: Any) -> None:
    def run(pipe: Pipe) -> None:
        tokens, target = make_batch()
        pipe.step(tokens, target=target)
        change(pipe)
        average_grads(pipe, unchanged)

    on_cut_ranks(1, run, model or make_decoder(is_tied=False), **options)


def test_parameter_without_a_gradient_is_refused() -> None:
    def drop(pipe: Pipe) -> None:
        dict(pipe.named_parameters())["blocks.0.norm.weight"].grad = None

    match = (
        r"^rank 0, stage 0: parameter 'blocks\.0\.norm\.weight' has no gradient\. Expected a dense "
        r"gradient of every parameter that is trained, .* Call average_grads after a step with "
        r"finalize=True, and freeze what the model does not use\.$"
    )
    with pytest.raises(GradientError, match=match):
        refused(drop)


def test_sparse_gradient_is_refused() -> None:
    model = make_decoder(is_tied=False)
    model.embedding.sparse = True
    match = r"^rank 0, stage 0: parameter 'embedding\.weight' has a sparse gradient\. Expected"
    with pytest.raises(GradientError, match=match):
        refused(lambda pipe: None, model)


def test_optimizers_that_step_in_the_backward_are_refused() -> None:
    match = (
        "^rank 0: the optimizers step in the backward, before gradients can be averaged. Leave out "
        "optimizer_in_backward, and step an optimizer after average_grads.$"
    )
    with pytest.raises(GradientError, match=match):
        refused(lambda pipe: None, optimizer_in_backward=torch.optim.SGD)
