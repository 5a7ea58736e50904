"""The backwards of torch.distributed.pipelining._backward, which are Penstock's own."""

from penstock.backward import stage_backward, stage_backward_input, stage_backward_weight

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]
