"""Expert parallelism: what several ranks compute together, said in one process.

A rank is one process of a process group.
"""

from mxspec.distributed.reference import Dispatched, combine_reference, dispatch_reference

__all__ = ["Dispatched", "combine_reference", "dispatch_reference"]
