"""Samples of text: the likeliest tokens after a prompt."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.parallel import ParallelModel
from penstock.training.token_loss import logits_of

SAMPLED_TOKENS = 64


def continue_text(
    pipe: ParallelModel,
    prompt: Sequence[int],
    *,
    rows: int,
    context: int,
    predict: Callable[[Tensor], object],
    end: int | None,
    count: int = SAMPLED_TOKENS,
) -> list[int]:
    """Return the likeliest tokens after a prompt, one forward of a whole batch for each.

    All ranks must call it. A batch has its one shape, so the prompt stands in all `rows`, with
    zeros after it, which no earlier token sees.
    """
    found = list(prompt)
    for _ in range(count):
        seen = found[-context:]
        row = torch.tensor([seen + [0] * (context - len(seen))])
        output = predict(row.expand(rows, context).contiguous())
        own = None
        if output is not None:  # On the rank of the last stage.
            own = int(logits_of(output)[0, len(seen) - 1].argmax())
        gathered = pipe.pipeline.gather(own, "to continue the text")
        token = next(token for token in gathered if token is not None)
        found.append(token)
        if token == end:
            break
    return found[len(prompt) :]
