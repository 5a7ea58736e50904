"""Replace torch.distributed.pipelining by penstock.compat in a process, without a changed line."""
