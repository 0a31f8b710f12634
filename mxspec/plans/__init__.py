"""Launch plans: a call that was seen before allocates its outputs and goes straight to Triton's launcher.

The ordinary path of a call checks the arguments, chooses a backend and a tile, makes descriptors and specializes the
kernel. All of that depends only on facts that `calls.described` collects: the op, the chosen backend, the options, and
each tensor's shape, strides, dtype, device and alignment. A plan holds the result for one such description.

- `calls.py`: the description of a call, and the bounded memory of plans.
- `recording.py`: the second call of a description takes the ordinary path, and the recorder watches it.
- `plan.py`: a plan, which is the allocations, the launches and the results of a call.
- `launchers.py`: the part that differs between releases of Triton.

The recorder refuses a call whose host function does anything that a plan cannot repeat. Such a call keeps the ordinary
path. So does every call while a launch hook of Triton is set, because a profiler must see the launch.

The environment variable MXSPEC_LAUNCH_PLANS=0 turns plans off. `turned_off` does so for a with-block.
"""

# The switch and the judge use the names with `as`. `turned_off` alone is public.
from mxspec.plans.calls import PLANS as PLANS
from mxspec.plans.calls import Description as Description
from mxspec.plans.calls import Plans as Plans
from mxspec.plans.calls import described as described
from mxspec.plans.calls import turned_off
from mxspec.plans.plan import Device as Device
from mxspec.plans.plan import Plan as Plan
from mxspec.plans.recording import record as record

__all__ = ["turned_off"]
