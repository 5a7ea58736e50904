"""Channels between ranks: over torch.distributed, or within one process."""

import penstock.torch_private  # noqa: F401 (checks torch)
from penstock.comm.abstract_comm import AbstractComm, Describe, Transfer, check_agreement
from penstock.comm.dry_run import DryGroup
from penstock.comm.loopback import LocalGroup, local_ranks
from penstock.comm.process_group import ProcessGroupComm

__all__ = [
    "AbstractComm",
    "Describe",
    "DryGroup",
    "LocalGroup",
    "ProcessGroupComm",
    "Transfer",
    "check_agreement",
    "local_ranks",
]
