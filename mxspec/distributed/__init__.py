"""Layers on several ranks over torch.distributed: tokens that travel to their experts, and weights gathered as codes.

A rank is one process of a process group. `ExpertParallel` shards the experts of a layer. `dispatch_reference`,
`combine_reference` and `wire_reference` say in one process what the ranks compute together. `gather_codes` makes FSDP2
gather the codes of FP8 weights. `register_sharding_rules` teaches DTensor the quantizers and the dense matmuls.
"""

from mxspec.distributed.code_gather import gather_codes
from mxspec.distributed.expert_parallel import ExpertParallel
from mxspec.distributed.reference import Dispatched, combine_reference, dispatch_reference, wire_reference
from mxspec.distributed.sharding_rules import register_sharding_rules

__all__ = [
    "Dispatched",
    "ExpertParallel",
    "combine_reference",
    "dispatch_reference",
    "gather_codes",
    "register_sharding_rules",
    "wire_reference",
]
