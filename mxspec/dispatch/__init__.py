"""The switch: it decides which backend runs an op, and explains the decision.

A backend is a folder `mxspec/<name>_kernels`. It implements an op if it holds a file with the op's name. The switch
knows nothing else: its code names no op, and no backend except `reference` and `auto`.

Each op is a `torch.library` operator whose implementation reads the switch when it runs. Code that torch.compile
traces never reads the switch, so a compiled function follows a later choice without recompiling.

`files` finds the ops and the backends. `choice` holds the user's choice. `resolve` decides which backend can run a
call, and runs it. `planned` repeats a call by its launch plan, if it has one. `schema`, `modes` and `operator` connect
an op to torch.library. `explanation` gives the reasons for a decision.
"""

from mxspec.dispatch.choice import current_backend, is_outer_block_unseen, set_backend, use_backend
from mxspec.dispatch.explanation import Explanation, explain
from mxspec.dispatch.files import backends, has_kernel, interpreters, kernel_module, ops, public, reference
from mxspec.dispatch.operator import op
from mxspec.dispatch.resolve import is_batch_invariant, refusal, static_refusal

__all__ = [
    "Explanation",
    "backends",
    "current_backend",
    "explain",
    "has_kernel",
    "interpreters",
    "is_batch_invariant",
    "is_outer_block_unseen",
    "kernel_module",
    "op",
    "ops",
    "public",
    "reference",
    "refusal",
    "set_backend",
    "static_refusal",
    "use_backend",
]
