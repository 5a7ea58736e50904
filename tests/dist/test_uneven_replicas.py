"""Two pipelines of two ranks that train as one process with both their batches would.

Ranks 0 and 1 are one pipeline, ranks 2 and 3 the other; their batches differ in size.
"""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import penstock
from fuzzing import rotated
from local_steps import mlp
from penstock import Pipeline
from penstock.errors import CommError, StageError
from penstock.microbatches.loss_weights import sum_over_replicas
from stage_training import assert_close, make_stages
from staged_models import WIDTH
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

SIZES = (7, 4)
IGNORED = -100
NUM_STEPS = 2
Result = tuple[dict[str, Tensor], list[Tensor]]


def token_mean(outputs: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, target, ignore_index=IGNORED)


def count_tokens(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def make_modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return mlp(2)


def make_batches(step: int, *, are_masked: bool) -> list[tuple[Tensor, Tensor]]:
    """One of each replica."""
    torch.manual_seed(1 + step)
    batches = []
    for size in SIZES:
        x, target = torch.randn(size, WIDTH).double(), torch.randint(0, WIDTH, (size,))
        if are_masked:
            target[torch.rand(size) < 0.4] = IGNORED
            target[0] = 0
        batches.append((x, target))
    return batches


def train(world: dist.ProcessGroup, schedule: str, wrapper: str, are_masked: bool) -> Result:
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    try:
        own, other = pipelines[rank // 2], replicas[rank % 2]
        return train_in(own, other, rank // 2, schedule, wrapper, are_masked)
    finally:
        gc.collect()  # A reducer is in a cycle, and with it lives its group.
        for group in (pipelines[rank // 2], replicas[rank % 2]):
            dist.destroy_process_group(group)


def train_in(
    pipeline_group: dist.ProcessGroup,
    replica_group: dist.ProcessGroup,
    replica: int,
    schedule: str,
    wrapper: str,
    are_masked: bool,
) -> Result:
    rank = dist.get_rank(pipeline_group)
    module = make_modules()[rank]
    is_ddp = wrapper == "DDP"
    wrapped = DistributedDataParallel(module, process_group=replica_group) if is_ddp else module
    stages = make_stages(pipeline_group, [wrapped, wrapped], [rank], dynamic_shapes=True)
    pipeline = Pipeline(
        stages,
        schedule,
        num_microbatches=3,
        loss_fn=token_mean,
        loss_weight=count_tokens if are_masked else None,
        replica_group=None if is_ddp else replica_group,
    )
    losses: list[Tensor] = []
    for step in range(NUM_STEPS):  # Gradients add up.
        x, target = make_batches(step, are_masked=are_masked)[replica]
        found: list[Tensor] = []
        pipeline.step(x, target=target, losses=found)
        losses += [torch.stack(found).mean()] if found else []
    grads = {f"{rank}.{name}": param.grad for name, param in module.named_parameters()}
    if not is_ddp:
        for grad in grads.values():
            dist.all_reduce(grad, group=replica_group)
            grad /= len(SIZES)
    return grads, losses


@rotated(
    num_cases=4,
    schedule=["1F1B", "ZB-H1"],
    wrapper=["DDP", "own all-reduce"],
    are_masked={"uneven": False, "masked": True},
)
def test_replicas_train_as_one_process_with_both_batches(
    schedule: str, wrapper: str, are_masked: bool, pool: WorkerPool
) -> None:
    results = pool.run(4, train, schedule, wrapper, are_masked)
    model = copy.deepcopy(nn.Sequential(*make_modules()))
    expected_losses = []
    for step in range(NUM_STEPS):
        batches = make_batches(step, are_masked=are_masked)
        x, target = (torch.cat(values) for values in zip(*batches, strict=True))
        loss = token_mean(model(x), target)
        loss.backward()
        expected_losses.append(loss.detach())
    for grads, _ in results:
        for name, grad in grads.items():
            assert_close(f"gradient of {name}", model.get_parameter(name).grad, grad)
    losses = [torch.stack(found) for _, found in results if found]
    assert_close("losses", torch.stack(expected_losses), torch.stack(losses).mean(0))


class WithLabels(nn.Module):
    """A model that computes its own loss, as causal ones of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*mlp(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        kept = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"logits": logits, "loss": functional.cross_entropy(*kept, ignore_index=IGNORED)}


def make_labels() -> tuple[Tensor, Tensor]:
    """A batch of 8 rows, of which the first half has fewer labels; one microbatch has none."""
    torch.manual_seed(1)
    x, labels = torch.randn(8, 5, WIDTH).double(), torch.randint(0, WIDTH, (8, 5))
    labels[:2] = IGNORED
    labels[2:4, 2:] = IGNORED
    labels[5, :3] = IGNORED
    return x, labels


def train_by_labels(world: dist.ProcessGroup, dim: str) -> tuple[float, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=(dim, "pp"))
    x, labels = (part.chunk(2)[dist.get_rank()] for part in make_labels())
    batch = {"x": x, "labels": labels}
    pipe = penstock.parallelize(
        WithLabels(), batch, loss_fn="model", num_microbatches=2, mesh=mesh, device="cpu"
    )
    loss = pipe.step(**batch).item()
    found = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
    pipe.close()
    return loss, whole


@pytest.mark.parametrize("dim", ["dp", "fsdp"])
def test_replicas_count_the_labels_of_all(fresh_pool: WorkerPool, dim: str) -> None:
    model = WithLabels()
    loss = model(*make_labels())["loss"]
    loss.backward()
    for found, grads in fresh_pool.run(2, train_by_labels, dim):
        assert loss.item() == pytest.approx(found, rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad)


def refusals(world: dist.ProcessGroup) -> list[str]:
    """What a pipeline of one rank says to groups of replicas that cannot be right."""
    rank = dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    module = nn.Linear(WIDTH, WIDTH).double()
    wrapped = DistributedDataParallel(module, process_group=world)
    x, target = torch.randn(4, WIDTH).double(), torch.randint(0, WIDTH, (4,))
    messages = []
    for options in ({"scale_grads": False}, {"loss_fn": None}, {}):
        try:
            stages = make_stages(alone, [wrapped], [0])
            given = {"loss_fn": token_mean, "replica_group": alone, **options}
            Pipeline(stages, "1F1B", num_microbatches=2, **given).step(x, target=target)
        except StageError as error:
            messages.append(str(error))
    return messages


def test_group_of_replicas_that_cannot_be_right_is_refused(pool: WorkerPool) -> None:
    for rank, (summed, without, other) in enumerate(pool.run(2, refusals)):
        assert "replica_group was given, but scale_grads is False" in summed
        assert "replica_group was given, but there is no loss_fn" in without
        assert f"replica_group has ranks [{rank}], but the wrapper around the last" in other


def lonely_step(world: dist.ProcessGroup) -> str:
    """What a replica says whose other one takes no step."""
    if dist.get_rank() == 1:
        return ""
    try:
        sum_over_replicas([1.0], world, torch.device("cpu"), 0.5)  # The deadline is what is tested.
    except CommError as error:
        return str(error)
    return "no error"


def test_replica_whose_others_take_no_step_does_not_wait_for_ever(pool: WorkerPool) -> None:
    message, _ = pool.run(2, lonely_step)
    pool.kill()  # gloo has closed the connections of the group.
    start = "rank 0 timed out or failed (limit 0.5 s) waiting with ranks [0, 1] for the loss"
    assert message.startswith(start)
