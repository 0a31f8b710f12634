"""Expert parallelism over torch.distributed: the experts of a layer lie on several ranks, and tokens travel to them.

A rank is one process of a process group. `ExpertParallel` shards the experts of a layer. `dispatch_reference`,
`combine_reference` and `wire_reference` say in one process what the ranks compute together.
"""

from mxspec.distributed.expert_parallel import ExpertParallel
from mxspec.distributed.reference import Dispatched, combine_reference, dispatch_reference, wire_reference

__all__ = ["Dispatched", "ExpertParallel", "combine_reference", "dispatch_reference", "wire_reference"]
