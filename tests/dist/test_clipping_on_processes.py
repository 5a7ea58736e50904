"""Clipping by the global norm, with parameters that are plain, sharded or tensor parallel."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_nets import assert_near, in_full, make_batch, make_blocks, make_rank, make_whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from limits import HANG_S
from local_steps import mean_square
from penstock import Pipeline, PipelineStage
from penstock.errors import CommError, GradientError
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

MAX_NORM = 0.05
WAYS = [(2.0, None), (2.0, False), (1.0, True), (float("inf"), None), (3.0, False)]

Clipped = list[tuple[Tensor, dict[str, Any]]]


def clip_all_ways(world: dist.ProcessGroup, kinds: list[str], is_tied: bool) -> Clipped:
    """Every replica trains on the same batch, so that stages of all kinds go together."""
    rank = make_rank(kinds, is_tied=is_tied)
    x, target = make_batch()
    found: Clipped = []
    for norm_type, foreach in WAYS:
        rank.zero_grad()
        rank.pipeline.step(x, target=target)
        norm = rank.pipeline.clip_grad_norm_(MAX_NORM, norm_type, foreach=foreach)
        found.append((norm, rank.grads()))
    return found


@pytest.mark.parametrize(
    ("kinds", "is_tied"),
    [
        (["plain", "fsdp", "tp", "ddp"], True),
        (["tp", "fsdp", "plain", "fsdp"], False),
    ],
    ids=["all kinds", "shards on one rank"],
)
def test_norm_and_gradients_are_those_of_the_whole_model(
    kinds: list[str], is_tied: bool, fresh_pool: WorkerPool
) -> None:
    ranks = fresh_pool.run(4, clip_all_ways, kinds, is_tied)
    whole = make_whole(is_tied)
    weights = dict(whole.named_parameters(remove_duplicate=False))
    x, target = make_batch()
    for number, (norm_type, _) in enumerate(WAYS):
        whole.zero_grad()
        mean_square(whole(x), target).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM, norm_type)
        assert expected > MAX_NORM
        for norms in ranks:
            norm, grads = norms[number]
            assert norm.equal(ranks[0][number][0])
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
            for name, grad in grads.items():
                assert_near(name, weights[name].grad, grad)


def clip_odd_placements(world: dist.ProcessGroup) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Gradients of every placement, which differ in form but have the values of `full`."""
    rank = make_rank(["plain"] * 4)
    mesh, (module, *_) = rank.mesh["replicas"], rank.modules.values()
    full = torch.arange(1.0, 8.0).double()
    shares = torch.stack([full * 0.25, full * 0.75])  # Partial sums, one for each replica.
    placed = [
        DTensor.from_local(
            full.chunk(2)[rank.replica].clone(), mesh, [Shard(0)], shape=(7,), stride=(1,)
        ),
        DTensor.from_local(full.clone(), mesh, [Replicate()]),
        DTensor.from_local(shares[rank.replica].clone(), mesh, [Partial()]),
        full.clone(),
    ]
    for number, grad in enumerate(placed):
        weight = nn.Parameter(torch.zeros_like(grad))
        weight.grad = grad
        module.register_parameter(f"odd{number}", weight)
    norm = rank.pipeline.clip_grad_norm_(1.0)
    grads = [in_full(module.get_parameter(f"odd{number}").grad) for number in range(4)]
    return norm, full, grads


def test_gradient_of_any_placement_counts_once(fresh_pool: WorkerPool) -> None:
    ranks = fresh_pool.run(4, clip_odd_placements)
    for norm, full, grads in ranks:
        expected = torch.stack([full] * 8).norm()  # Four on each of two ranks.
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0.0)
        assert norm.equal(ranks[0][0])
        for grad in grads:
            torch.testing.assert_close(grad, full / (expected + 1e-6), rtol=1e-14, atol=0.0)


def clip_gradients_of_some_ranks(world: dist.ProcessGroup) -> tuple[Tensor, list[Tensor | None]]:
    """Partial and sharded gradients that only the second replica has, or none."""
    rank = make_rank(["plain"] * 4)
    mesh, (module, *_) = rank.mesh["replicas"], rank.modules.values()
    whole, half = torch.arange(1.0, 8.0), torch.arange(1.0, 5.0)
    for number, (local, kind, placement) in enumerate(
        [
            (whole, Replicate(), Partial()),
            (whole, Replicate(), Partial("avg")),
            (half, Shard(0), Shard(0)),
            (half, Shard(0), None),
        ]
    ):
        weight = nn.Parameter(DTensor.from_local(torch.zeros_like(local), mesh, [kind]))
        if rank.replica == 1 and placement is not None:
            weight.grad = DTensor.from_local(local.clone(), mesh, [placement])
        module.register_parameter(f"odd{number}", weight)
    norm = rank.pipeline.clip_grad_norm_(1.0)
    grads = [module.get_parameter(f"odd{number}").grad for number in range(4)]
    return norm, [grad.to_local().clone() if isinstance(grad, DTensor) else None for grad in grads]


def test_ranks_without_a_gradient_join_those_that_have_one(fresh_pool: WorkerPool) -> None:
    """Those without one did not join the reduction of partial sums, for which others waited."""
    ranks = fresh_pool.run(4, clip_gradients_of_some_ranks)
    whole, half = torch.arange(1.0, 8.0), torch.arange(1.0, 5.0)
    expected = torch.cat([whole, whole / 2, half] * 2).norm()  # On each of two ranks.
    for number, (norm, grads) in enumerate(ranks):
        torch.testing.assert_close(norm, expected)
        assert norm.equal(ranks[0][0])
        if number % 2 == 0:
            assert [None] * 4 == grads
            continue
        for before, grad in zip((whole, whole, half), grads, strict=False):
            torch.testing.assert_close(grad, before / (expected + 1e-6))
        assert grads[3] is None


def clip_what_cannot_be(world: dist.ProcessGroup, case: str) -> tuple[str, bool]:
    rank = make_rank(["plain"] * 4, timeout=HANG_S)
    mesh, (module, *_) = rank.mesh["replicas"], rank.modules.values()
    is_first = rank.replica == 0
    grad: Tensor | None = torch.ones(4)
    match case:
        case "maximum":
            grad = DTensor.from_local(grad, mesh, [Partial("max")])
        case "other placements":
            grad = DTensor.from_local(grad, mesh, [Replicate() if is_first else Partial()])
        case "one replica":
            grad = None if is_first else DTensor.from_local(grad, mesh, [Replicate()])
        case "plain":
            grad = grad if is_first else DTensor.from_local(grad, mesh, [Replicate()])
    for name, value in (("first", DTensor.from_local(torch.ones(4), mesh)), ("odd", grad)):
        weight = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Replicate()]))
        weight.grad = value
        module.register_parameter(name, weight)
    try:
        rank.pipeline.clip_grad_norm_(0.1)
    except GradientError as error:
        return str(error), grad is None or torch.ones(4).equal(local_values(grad))
    return "", False


def local_values(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("maximum", "odd: the gradient has the placement P(max), so scaling its parts does not"),
        ("other placements", "different forms: torch.float32 (R); torch.float32 (P(sum))"),
        ("one replica", "is replicated over dimension 0 of its mesh, but the ranks at [(0,)] of"),
        ("plain", "the ranks of its mesh have 1, 2 gradients on that mesh"),
    ],
)
def test_gradients_whose_norm_is_not_known_are_refused_by_all_ranks(
    case: str, text: str, fresh_pool: WorkerPool
) -> None:
    for number, (message, is_left) in enumerate(fresh_pool.run(4, clip_what_cannot_be, case)):
        assert message.startswith(f"stage {number // 2} on rank {number // 2}, ")
        assert text in message
        assert is_left


def clip_what_is_not_finite(world: dist.ProcessGroup) -> list[tuple[str, bool, bool]]:
    """One NaN, in the shard of the last process; what is raised, and what is left afterwards."""
    rank = make_rank(["fsdp"] * 4)
    x, target = make_batch()
    found = []
    for norm_type in (2.0, float("inf")):
        rank.zero_grad()
        rank.pipeline.step(x, target=target)
        grad = rank.parameters()[0].grad
        assert isinstance(grad, DTensor)
        if dist.get_rank() == 3:
            grad.to_local().view(-1)[0] = torch.nan
        before = grad.to_local().clone()
        message = ""
        try:
            rank.pipeline.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
        except GradientError as error:
            message = str(error)
        is_left = torch.equal(before.nan_to_num(), grad.to_local().nan_to_num())
        norm = rank.pipeline.clip_grad_norm_(1.0, norm_type)
        found.append((message, is_left, bool(norm.isnan())))
    return found


def test_value_that_is_not_finite_is_found_by_all_ranks(fresh_pool: WorkerPool) -> None:
    for found in fresh_pool.run(4, clip_what_is_not_finite):
        for order, (message, is_left, is_nan) in zip(("2", "inf"), found, strict=True):
            assert f"norm of order {order} over the gradients of all ranks is nan" in message
            assert is_left
            assert is_nan


def clip_without_the_others(world: dist.ProcessGroup) -> tuple[str, float]:
    """The processes of the second replica do not clip: those of the first give up in time."""
    rank = make_rank(["fsdp"] * 4, timeout=3.0)
    x, target = make_batch()
    rank.pipeline.step(x, target=target)
    began_s = time.monotonic()
    message = ""
    if rank.replica == 0:
        try:
            rank.pipeline.clip_grad_norm_(1.0)
        except CommError as error:
            message = str(error)
    waited_s = time.monotonic() - began_s
    dist.barrier(world)
    return message, waited_s


def test_wait_for_the_norms_of_shards_has_a_deadline(fresh_pool: WorkerPool) -> None:
    results = fresh_pool.run(4, clip_without_the_others)
    fresh_pool.kill()  # Their groups are still waiting.
    for rank in (0, 2):
        message, waited_s = results[rank]
        start = (
            f"rank {rank} timed out or failed (limit 3 s) waiting with ranks [{rank}, {rank + 1}]"
        )
        assert f"{start} for the placements of gradients" in message
        assert waited_s < 30


def clip_without_rank_0(world: dist.ProcessGroup) -> tuple[str, str]:
    """The first rank of a pipeline does not clip: the other gives up in time."""
    rank = make_rank(["plain"] * 4, timeout=3.0)
    x, target = make_batch()
    rank.pipeline.step(x, target=target)
    kind, message = "", ""
    if rank.mesh.get_local_rank("pipeline") == 1:
        try:
            rank.pipeline.clip_grad_norm_(1.0)
        except CommError as error:
            kind, message = type(error).__name__, str(error)
    dist.barrier(world)
    return kind, message


def test_wait_for_the_norms_of_stages_has_a_deadline(fresh_pool: WorkerPool) -> None:
    for kind, message in fresh_pool.run(4, clip_without_rank_0)[2:]:
        assert "DeadlineError" == kind
        assert message.startswith("rank 1 timed out after 3 s waiting for the norm of the")


def clip_too_early(world: dist.ProcessGroup) -> str:
    rank = make_rank(["fsdp"] * 4)
    x, target = make_batch()
    for stage in rank.stages:
        stage.submod.set_requires_gradient_sync(False)
    rank.pipeline.step(x, target=target)
    try:
        rank.pipeline.clip_grad_norm_(1.0)
    except GradientError as error:
        return str(error)
    except CommError as error:
        return str(error)
    return ""


def test_gradients_that_are_not_reduced_yet_are_not_clipped(fresh_pool: WorkerPool) -> None:
    for message in fresh_pool.run(4, clip_too_early):
        assert "has gradients that are not reduced yet" in message


def clip_before_the_all_reduce(world: dist.ProcessGroup) -> tuple[str, Tensor, dict[str, Any]]:
    """Replicas of shards all-reduce in the second of three steps; clip after it and the last."""
    names = ("pipeline", "replicate", "shard")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    [block] = make_blocks(num_blocks=1)
    module = fully_shard(block, mesh=mesh["replicate", "shard"])
    stage = PipelineStage(module, 0, 1, "cpu", group=mesh["pipeline"].get_group())
    pipeline = Pipeline([stage], "1F1B", num_microbatches=2, loss_fn=mean_square, timeout=HANG_S)
    number = dist.get_rank(world)

    def step(batch: int, *, is_last: bool) -> None:
        x, target = make_batch(batch)
        module.set_requires_all_reduce(is_last)
        pipeline.step(x.chunk(4)[number], target=target.chunk(4)[number])

    step(0, is_last=False)
    step(1, is_last=True)
    norm = pipeline.clip_grad_norm_(MAX_NORM)
    grads = {name: in_full(weight.grad) for name, weight in block.named_parameters()}
    step(2, is_last=False)
    try:
        pipeline.clip_grad_norm_(MAX_NORM)
    except GradientError as error:
        return str(error), norm, grads
    return "", norm, grads


def test_gradients_that_replicas_have_not_all_reduced_are_not_clipped(
    fresh_pool: WorkerPool,
) -> None:
    """They were silently left out of the norm, and were not scaled."""
    whole = make_whole(num_blocks=1)
    for step in range(2):
        x, target = make_batch(step)
        mean_square(whole(x), target).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    for message, norm, grads in fresh_pool.run(4, clip_before_the_all_reduce):
        assert message.startswith("stage 0 on rank 0 has gradients that are not reduced yet")
        assert "set_requires_all_reduce(False)" in message
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
        for name, grad in grads.items():
            assert_near(name, whole.get_parameter(f"0.{name}").grad, grad)
