"""A folder of Hugging Face and a text, through all that `penstock train` does with them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from launcher import launch_command
from pretrained_folders import make_llama

pytestmark = pytest.mark.dist


def test_hugging_face_folder_is_trained_stopped_resumed_evaluated_and_exported(
    tmp_path: Path,
) -> None:
    """What a new user does with a model and a text, on 2 processes, then on 4, then on 1."""
    source = tmp_path / "llama"
    make_llama(max_position_embeddings=32).save_pretrained(source)
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 20)
    words = {"the": 0, "quick": 1, "brown": 3, "fox": 4, "jumps": 5, ".": 6, "?": 7}
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "?"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "run.toml").write_text(
        f'model = "llama"\ndata = "{text}"\ndtype = "bfloat16"\ncontext = 4\nbatch = 8\n'
        "microbatches = 4\nlr = 0.01\nclip = 1\nwarmup = 2\nmin-lr = 0.001\nsteps = 6\n"
        'schedule = "1F1B"\neval-share = 0.2\ncheckpoint = "runs"\nevery = 3\nkeep = 9\n'
    )
    whole = figures_of(launch_command(["train", "run.toml", "--json"], tmp_path))
    shutil.rmtree(tmp_path / "runs" / "step-000006")  # As if it had been stopped in step 5.
    again = ["train", "run.toml", "--resume", "--json", "--schedule=ZB-H1", "--export=exported"]
    resumed = figures_of(launch_command([*again, "--ranks=4"], tmp_path, num_ranks=4))
    # Split backwards round their products otherwise, to 8 bits.
    assert whole["loss"][3:] == pytest.approx(resumed["loss"], rel=0.02)
    alone = ["train", "--checkpoint=runs", "--resume", "--evaluate-only", "--json", "--ranks=1"]
    evaluated = figures_of(launch_command(alone, tmp_path, num_ranks=1))
    assert resumed["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-3)

    exported = tmp_path / "exported"
    assert tokenizer == json.loads((exported / "tokenizer.json").read_text())
    model = LlamaForCausalLM.from_pretrained(exported)
    assert torch.bfloat16 == model.dtype
    made = model.generate(torch.ones(2, 4, dtype=torch.long), max_new_tokens=4, min_new_tokens=4)
    assert (2, 8) == made.shape
    launch_command(["export", "runs", "second"], tmp_path, num_ranks=1)
    second = LlamaForCausalLM.from_pretrained(tmp_path / "second").state_dict()
    assert all(torch.equal(value, second[name]) for name, value in model.state_dict().items())


def figures_of(printed: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"loss": [], "eval_loss": []}
    for line in printed.splitlines():
        for name, value in json.loads(line).items():
            if name in found:
                found[name].append(value)
    return found
