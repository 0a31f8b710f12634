"""The switch: which backend runs an op, and why.

A backend is a folder `mxspec/<name>_kernels`; it implements an op where it holds a file of the op's name. That is
all this package knows: it names no op and no backend but `reference` and `auto`.

Each op is a `torch.library` operator whose implementation reads the switch when it runs. The switch is never read
in code that torch.compile traces, so a compiled function follows a later choice without recompiling.

`files`: what there is. `choice`: what the user asked for. `resolve`: what can run, and the run. `schema`, `modes` and
`operator`: torch.library. `explanation`: why.
"""

from mxspec.dispatch.choice import current_backend, is_outer_block_unseen, set_backend, use_backend
from mxspec.dispatch.explanation import Explanation, explain
from mxspec.dispatch.files import backends, has_kernel, interpreters, kernel_module, ops, public, reference
from mxspec.dispatch.operator import op
from mxspec.dispatch.resolve import refusal, static_refusal

__all__ = [
    "Explanation",
    "backends",
    "current_backend",
    "explain",
    "has_kernel",
    "interpreters",
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
