"""Faster operators for Triton's interpreter. They compute the same bits.

For every operator of two operands, such as `+` or `<`, the interpreter finds the common type, casts and broadcasts both
operands, and checks the size of the result. Each step makes a new tensor. All steps but one depend only on the types of
the operands. So the first call with given types is Triton's, and it is watched. Later calls with the same types make
only the call of numpy that was seen.

A call is not repeated in this way if it did anything else than cast integers, broadcast, and call numpy once. Pointers
and bfloat16 therefore stay with Triton.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = (
    *("add", "sub", "mul", "and_", "or_", "xor_", "shl", "lshr", "minimum", "maximum"),
    *("less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal"),
)
# The operations that give the same on bools as on integers of one bit. Triton 3.9 adds bools as integers of one bit.
_OF_BOOLS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.equal, np.not_equal)
_NO_PLAN = ()  # the call is always Triton's


def accelerate_operators(interpreter: Any) -> None:
    """Replace the operators of two operands in `triton.runtime.interpreter`."""
    builder, semantic = interpreter.InterpreterBuilder, interpreter.interpreter_semantic
    tensor, handle_of, no_handle = interpreter.tl.core.tensor, interpreter.TensorHandle, object.__new__
    triton_binary_op, seen, watching = builder.binary_op, list[tuple[Any, Any, Any]](), list[bool]()

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if watching:
            seen.append((left, right, op))
        return triton_binary_op(self, left, right, op)

    def plan_of(operands: tuple[Any, Any], found: Any) -> tuple[Any, ...]:
        """How to repeat a call that was seen, or `_NO_PLAN`."""
        if len(seen) != 1 or type(found) is not tensor:
            return _NO_PLAN
        *given, op = seen[0]
        ways: list[Any] = []
        for operand, used in zip(operands, given, strict=True):
            if type(operand) is not tensor:  # a constant: all elements are equal
                ways.append(used.data.reshape(-1)[:1].reshape((1,) * used.data.ndim).copy())
                continue
            before, after = operand.type.scalar, used.dtype.scalar
            if before == after and operand.handle.data.dtype == used.data.dtype:
                ways.append(None)
            elif before.is_int() and after.is_int() and not after.is_bool():
                ways.append(used.data.dtype)
            else:
                return _NO_PLAN
        values = found.handle.data
        if any(used.data.dtype == bool for used in given) and op not in _OF_BOOLS:
            return _NO_PLAN
        plan = op, *ways, values.dtype, values.shape, found.handle.dtype, found.type, {**vars(found), "handle": None}
        again = repeated(plan, operands)
        return plan if again is not None and again.handle.data.tobytes() == values.tobytes() else _NO_PLAN

    def repeated(plan: tuple[Any, ...], operands: tuple[Any, Any]) -> Any:
        op, left_way, right_way, dtype, shape, element, _, described = plan
        left, right = operands
        if left_way is None:
            left = left.handle.data
        else:
            left = left_way if type(left_way) is np.ndarray else left.handle.data.astype(left_way)
        if right_way is None:
            right = right.handle.data
        else:
            right = right_way if type(right_way) is np.ndarray else right.handle.data.astype(right_way)
        values = op(left, right)
        if values.shape != shape:
            return None
        if values.dtype != dtype:
            values = values.astype(dtype)
        # Made without their constructors, which would check the size and describe the shape again.
        handle, out = no_handle(handle_of), no_handle(tensor)
        handle.data, handle.dtype, handle.attr = values, element, {}
        vars(out).update(described)
        out.handle = handle
        return out

    def replaced(triton_operator: Any) -> Any:
        plans = dict[Any, tuple[Any, ...]]()

        def operator(left: Any, right: Any, *options: Any) -> Any:
            key = *key_of(left), *key_of(right), options
            if None in key:
                return triton_operator(left, right, *options)
            plan = plans.get(key)
            if plan:
                out = repeated(plan, (left, right))
                return triton_operator(left, right, *options) if out is None else out
            if plan is _NO_PLAN:
                return triton_operator(left, right, *options)
            watching.append(True)
            try:
                found = triton_operator(left, right, *options)
            finally:
                watching.pop()
            plans[key] = plan_of((left, right), found)
            seen.clear()
            return found

        return operator

    def key_of(operand: Any) -> tuple[Any, Any]:
        kind = type(operand)
        if kind is tensor:
            return operand.type.name, operand.handle.data.dtype.char
        if kind is int or (kind is float and operand and operand == operand):  # 0.0 equals -0.0, and NaN is not itself
            return kind, operand
        return None, None

    builder.binary_op = binary_op
    for name in NAMES:
        setattr(semantic, name, replaced(getattr(semantic, name)))
