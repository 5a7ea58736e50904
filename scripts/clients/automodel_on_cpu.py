"""Train a small Llama of transformers by NeMo Automodel's AutoPipeline; print losses and norms.

    torchrun --nproc-per-node 2 scripts/clients/automodel_on_cpu.py SCHEDULE GROWS

If GROWS is 1, each step has longer sequences.
The file knows nothing of Penstock. compare_automodel.py starts it.
"""

import sys

import torch
import transformers
from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

WORDS, LENGTH, SIZE, NUM_STEPS = 61, 8, 4, 3


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def main(schedule: str, grows: bool) -> None:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=WORDS,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    pipeline = AutoPipeline(
        world_mesh=mesh,
        pp_schedule=schedule,
        pp_microbatch_size=1,
        pp_batch_size=SIZE,
        device=torch.device("cpu"),
        dtype=torch.float32,
    ).build(model, loss_fn=loss_fn)
    parameters = [p for part in pipeline.parts for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(NUM_STEPS):
        length = LENGTH + step * grows
        words = torch.randint(WORDS, (SIZE, length), generator=torch.Generator().manual_seed(step))
        if grows:
            pipeline.update_seq_len(length)
        has_last = pipeline.info.has_last_stage
        losses: list[torch.Tensor] | None = [] if has_last else None
        args = (words,) if pipeline.info.has_first_stage else ()
        target = words.roll(-1, 1) if has_last else None
        pipeline.info.schedule.step(*args, target=target, losses=losses)
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        loss = f" loss {torch.stack(losses).mean().item():.7f}" if losses else ""
        rank = torch.distributed.get_rank()
        sys.stdout.write(f"rank {rank} step {step} norm {norm.item():.7f}{loss}\n")
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1")
