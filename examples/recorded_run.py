"""Shows: recording a few steps on two processes, and reading what the recording says.

It writes run.json and run.html to penstock-examples; "penstock show" reads the first too.
Run it with: torchrun --standalone --nproc-per-node 2 examples/recorded_run.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.draw import Panel, save

WIDTH, BATCH, NUM_MICROBATCHES, NUM_STEPS = 256, 512, 4, 10
FOLDER = Path("penstock-examples")


def record() -> penstock.Recording:
    """What each rank runs; all of them get the same recording."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    schedule = penstock.schedules.get("ZB-V")(
        num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES
    )
    stages = []
    for i in schedule.placement.stages_of(rank):
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        stages.append(penstock.PipelineStage(module, i, schedule.num_stages, "cpu"))
    pipeline = penstock.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss)
    x, target = torch.randn(2, BATCH, WIDTH)
    pipeline.step(x, target=target)  # In the first step ranks find each other.
    with penstock.record() as run:
        for _ in range(NUM_STEPS):
            pipeline.step(x, target=target, return_outputs=False)
    return run.recording


def read(recording: penstock.Recording) -> None:
    measured, simulated = recording.typical(), recording.simulated()
    print(f"{len(recording.steps)} steps were recorded")
    for name, report in (("measured", measured), ("simulated", simulated)):
        print(
            f"{name}: {report.makespan * 1e3:.1f} ms, a bubble of {report.bubble_by_makespan:.1%}"
        )
    # Where a rank waited longest in the typical step, and for what.
    last_end = {rank: 0.0 for rank in range(len(measured.ranks))}
    waits = []
    for rank, action, start, end in measured.actions():
        waits.append((start - last_end[rank], rank, str(action)))
        last_end[rank] = end
    for wait_s, rank, action in sorted(waits, reverse=True)[:3]:
        print(f"rank {rank} waited {wait_s * 1e3:.2f} ms before {action}")


def main() -> None:
    dist.init_process_group("gloo")
    recording = record()
    if dist.get_rank() == 0:
        FOLDER.mkdir(exist_ok=True)
        recording.save(FOLDER / "run.json")
        read(penstock.Recording.load(FOLDER / "run.json"))
        save([Panel.of_recording("ZB-V, measured", recording)], FOLDER / "run.html")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
