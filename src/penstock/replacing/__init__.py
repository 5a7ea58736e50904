"""Replace torch.distributed.pipelining by penstock.compat in a process, without a changed line."""

from penstock.replacing.import_hook import COMPARE, THEIRS, install, startup_folder, torch_in_place

__all__ = ["COMPARE", "THEIRS", "install", "startup_folder", "torch_in_place"]
