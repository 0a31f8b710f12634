"""The kernel with TMA for Blackwell. Interpreted, it has the bits of the plain tiles; its machine code is compiled.

No GPU has run it. An emulation replaces the hardware's scaled products.
"""

import re

import pytest
import torch

from mxspec import check, dispatch
from mxspec.cases.common.token_groups import offs_of
from mxspec.machine_code.compile import compile_case, problems
from mxspec.machine_code.fake_gpu import fake_gpu, unavailable
from mxspec.machine_code.measure import dumped, measure

pytest.importorskip("triton")

from mxspec.triton_kernels.blackwell import mx_matmul as kernel
from mxspec.triton_kernels.common import launch
from tests.helpers import dot_scaled, only_interpreted

pytestmark = pytest.mark.turns(8)  # each test compiles kernels

OPS = ("mx_gemm", "mx_grouped_gemm", "mx_grouped_gemm_wgrad")
E4M3FN, E5M2, E8M0FNU = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
compiles = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))


@pytest.fixture
def taken(monkeypatch):
    """The schedule of each launch. The CPU counts as a Blackwell with three processors, so a program has several tiles.

    The plain tiles then have Blackwell's configuration, too.
    """
    from triton.language.semantic import TritonSemantic

    run, schedules = kernel.mx_sm100, []

    def watched(*args, **options):
        config = {**kernel.config_for(*kernel_facts(*args, **options)), **options}
        schedules.append(next(name for name, known in kernel.CONFIGS.items() if known.items() <= config.items()))
        return run(*args, **options)

    monkeypatch.setattr(TritonSemantic, "dot_scaled", dot_scaled)
    monkeypatch.setattr(kernel, "processors", lambda device: 3)
    monkeypatch.setattr(kernel, "mx_sm100", watched)
    for module in (kernel, launch):
        monkeypatch.setattr(module, "capability", lambda device: (10, 0))
    return schedules


def kernel_facts(a, a_scale, b, b_scale, out, offs=None, grouped="", **_):
    return a.shape[1], b.shape[-2], grouped, 1 if offs is None else len(offs), out.dtype


def both(op, args, options, monkeypatch):
    """The bits of the kernel and of the plain tiles."""
    run = getattr(dispatch.kernel_module(op, "triton"), op)
    got = run(*args, **options)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "reads", lambda *_: False)
        expected = run(*args, **options)
    return got.view(torch.uint8), expected.view(torch.uint8)


def own_cases(op):
    return [
        c for c in dispatch.reference(op).spec.cases() if not c.raises and not set(c.flags) & {"generated", "large"}
    ]


@only_interpreted
@pytest.mark.parametrize(("op", "least"), [*zip(OPS, (18, 28, 22), strict=True)])
def test_cases(op, least, taken, monkeypatch):
    """The engine accepts the kernel's result of each case that it takes, and the result has the plain tiles' bits."""
    run = 0
    for case in own_cases(op):
        taken.clear()
        result = check.check_case(op, case, "triton")
        if not taken:
            continue
        run += 1
        assert result.status == "passed", f"{case.name}: {result.message}"
        args = check.on_device(torch.device("cpu"), case.args())
        got, expected = both(op, args, case.kwargs, monkeypatch)
        assert got.equal(expected), case.name
    assert run >= least


def operands(op, rows, N, K, sizes, dtypes=(E4M3FN, E4M3FN), padding=0):
    """Arguments of an op with blocked scales. `padding` is the value of all scale bytes that belong to no block."""
    of = dispatch.reference
    generator = torch.Generator().manual_seed(rows + N + K)

    def made(dtype, *shape):
        codes = (torch.randn(*shape, generator=generator) * 8).to(dtype)
        scale = torch.randint(120, 134, (*shape[:-1], shape[-1] // 32), generator=generator)
        return codes, scale.to(torch.uint8).view(E8M0FNU)

    def blocked(scale, layout, *more):
        """The bytes of a layout, with another value in its padding: 255 in one of two layouts of marks."""
        bytes_of = [
            layout(s.view(E8M0FNU), *more) for s in (scale.view(torch.uint8), torch.ones_like(scale.view(torch.uint8)))
        ]
        bytes_of = [(b[0] if isinstance(b, tuple) else b).view(torch.uint8) for b in bytes_of]
        return bytes_of[0].masked_fill(bytes_of[1] == 0, padding).view(E8M0FNU)

    b, b_scale = made(dtypes[1], *((len(sizes), N, K) if op == OPS[1] else (N, K)))
    a, a_scale = made(dtypes[0], rows, K)
    if op == OPS[0]:
        return a, blocked(a_scale, of("to_blocked")), b, blocked(b_scale, of("to_blocked"))
    offs = offs_of(sizes)
    if op == OPS[1]:
        b_scale = torch.stack([blocked(s, of("to_blocked")) for s in b_scale])
        return a, blocked(a_scale, of("to_blocked_m_groups"), offs), b, b_scale, offs
    # The last group begins with a NaN of each operand. The step before it must not multiply them, not even by zero.
    last = sum(sizes[:-1])
    a.view(torch.uint8)[3, last], b.view(torch.uint8)[5, last] = 0x7F, 0x7F
    scales = (blocked(s, of("to_blocked_k_groups"), offs) for s in (a_scale, b_scale))
    return a.mT, next(scales), b.mT, next(scales), offs


SHAPES = {
    # several tiles for each program; the last tile of rows and of columns is partial
    "dense, wide": (OPS[0], 300, 520, 384, [], torch.bfloat16, "persistent, wide"),
    "dense, fp32": (OPS[0], 300, 264, 256, [], torch.float32, "persistent"),
    "dense, few columns": (OPS[0], 700, 104, 256, [], torch.bfloat16, "persistent"),
    "dense, K of 2 3/4 steps": (OPS[0], 300, 264, 352, [], torch.bfloat16, "tail"),
    "dense, K shorter than a step": (OPS[0], 130, 264, 96, [], torch.float32, "tail"),
    # groups that begin inside a tile of rows, an empty one, one of whole tiles, and rows of no group
    "M-groups, wide": (OPS[1], 440, 264, 256, [130, 0, 5, 256], torch.bfloat16, "persistent, wide"),
    "M-groups, fp32": (OPS[1], 440, 136, 256, [130, 0, 5, 256], torch.float32, "persistent"),
    "M-groups, K of 1 1/4 steps": (OPS[1], 440, 136, 160, [130, 0, 5, 256], torch.bfloat16, "tail"),
    "M-groups, no token": (OPS[1], 140, 136, 128, [0, 0], torch.bfloat16, "persistent, wide"),
    # groups of whole steps, of less than a step, empty, and tokens of no group
    "K-groups": (OPS[2], 300, 136, 640, [256, 0, 32, 224], torch.float32, "tail"),
    "K-groups, bf16": (OPS[2], 136, 264, 448, [96, 128, 160], torch.bfloat16, "tail"),
}


@only_interpreted
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, taken, monkeypatch):
    op, rows, N, K, sizes, out_dtype, schedule = SHAPES[name]
    args = operands(op, rows, N, K, sizes, (E4M3FN, E5M2), padding=255)
    options = {"out_dtype": out_dtype, "scale_layout": "blocked"}
    got, expected = both(op, args, options, monkeypatch)
    assert taken == [schedule]
    assert got.equal(expected)
    exact = dispatch.reference(op)(*args, **options)
    assert check.difference((got.view(out_dtype),), (exact,), dispatch.reference(op).spec.min_sqnr_db) is None


@only_interpreted
def test_more_groups_than_a_program_reads_at_once(taken, monkeypatch):
    sizes = [1] * 257
    args = operands(OPS[1], 260, 16, 128, sizes)
    got, expected = both(OPS[1], args, {"out_dtype": torch.float32, "scale_layout": "blocked"}, monkeypatch)
    assert taken == ["tail"]
    assert got.equal(expected)


@only_interpreted
@pytest.mark.parametrize("op", OPS[1:])
def test_offs_out_of_order_stays_inside(op, taken):
    """The result has no meaning. The memory around the output keeps its bytes."""
    args = operands(op, 256, 136, 256, [96, 64, 96])
    for wrong in ([128, 64, 256], [256, 256, 32], [-64, 2**31 - 32, 96], [2**30, -(2**31), 2**31 - 1]):
        around = torch.full((3 * 256 * 136 * 3,), 7.0, dtype=torch.float32)
        offs = torch.tensor(wrong, dtype=torch.int32)
        if op == OPS[1]:
            out = around[2**16 : 2**16 + 256 * 136].view(256, 136)
            kernel.mx_sm100(*args[:4], out, offs=offs, grouped="M")
        else:
            out = around[2**16 : 2**16 + 3 * 256 * 136].view(3, 256, 136)
            kernel.mx_sm100(args[0].mT, args[1], args[2].mT, args[3], out, offs=offs, grouped="K")
        assert (around[: 2**16] == 7).all()
        assert (around[2**16 + out.numel() :] == 7).all()


@only_interpreted
@pytest.mark.parametrize("K", [256, 288])
def test_a_row_keeps_its_bits_in_more_rows(K, taken):
    """Both schedules, and tiles of other rows. A scale of a whole tile of rows is cut from the blocked layout."""
    a, a_scale, b, b_scale = operands(OPS[0], 500, 136, K, [])
    plain = dispatch.reference("from_blocked")(a_scale, 500, K // 32)
    expected = torch.empty(500, 136, dtype=torch.bfloat16)
    kernel.mx_sm100(a, a_scale, b, b_scale, expected)
    for first, last in ((0, 1), (37, 38), (120, 140), (3, 499)):
        out = torch.empty(last - first, 136, dtype=torch.bfloat16)
        kernel.mx_sm100(a[first:last], dispatch.reference("to_blocked")(plain[first:last]), b, b_scale, out)
        assert out.equal(expected[first:last]), (first, last)


@only_interpreted
def test_what_tma_cannot_reach_is_for_plain_tiles(taken):
    """Rows that begin at other addresses, overlap, or hold plain scales."""
    a, a_scale, b, b_scale = operands(OPS[0], 130, 144, 256, [])
    out = torch.empty(130, 144, dtype=torch.bfloat16)
    assert kernel.reads(a, a_scale, b, b_scale, out, "blocked")
    assert not kernel.reads(a, a_scale, b, b_scale, out, "plain")
    shifted = torch.zeros(130 * 256 + 16, dtype=torch.uint8).view(E4M3FN)[8 : 8 + 130 * 256].view(130, 256)
    assert not kernel.reads(shifted, a_scale, b, b_scale, out, "blocked")
    assert not kernel.reads(torch.empty(130, 264).to(E4M3FN)[:, :256], a_scale, b, b_scale, out, "blocked")
    assert not kernel.reads(a[:1].expand(130, 256), a_scale, b, b_scale, out, "blocked")
    assert not kernel.reads(a, a_scale, b[:140], b_scale, torch.empty(130, 140, dtype=torch.bfloat16), "blocked")
    assert not kernel.reads(a, a_scale, b[:0], b_scale, out[:, :0], "blocked")


# --- machine code -------------------------------------------------------------------------------------------------


def compiled(grouped, K, out_dtype, dtypes=(E4M3FN, E4M3FN), E=4, M=1024, N=1024, **options):
    """The compiled kernel of a call on meta tensors, and its assembly code."""

    def meta(*shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    def tiles(rows):
        return -(-rows // 128) * -(-K // 128) * 512

    offs = meta(E, dtype=torch.int32) if grouped else None
    b, b_scale = meta(*([E] if grouped == "M" else []), N, K, dtype=dtypes[1]), meta(tiles(N), dtype=E8M0FNU)
    a_scale, out = meta(tiles(M), dtype=E8M0FNU), meta(*([E] if grouped == "K" else []), M, N, dtype=out_dtype)
    if grouped == "M":
        a_scale, b_scale = meta(M + 128 * E, -(-K // 128) * 4, dtype=E8M0FNU), meta(E, tiles(N), dtype=E8M0FNU)
    elif grouped == "K":
        a_scale, b_scale = (meta(rows, K // 32 + 4 * E, dtype=E8M0FNU) for rows in (M, N))
    a = meta(M, K, dtype=dtypes[0])
    with fake_gpu("sm100"):
        made = kernel.mx_sm100(a, a_scale, b, b_scale, out, offs=offs, grouped=grouped, **options)
        return made, measure(made, "sm100"), made.asm["ptx"]


CALLS = {
    "dense, wide": ("", 1024, torch.bfloat16),
    "dense, fp32": ("", 1024, torch.float32),
    "dense, tail": ("", 1056, torch.bfloat16),
    "M-groups, wide": ("M", 1024, torch.bfloat16),
    "M-groups, fp32": ("M", 1024, torch.float32),
    "M-groups, tail": ("M", 1056, torch.float32),
    "K-groups, fp32": ("K", 1024, torch.float32),
    "K-groups, bf16": ("K", 1024, torch.bfloat16),
}
each_call = pytest.mark.parametrize("name", CALLS)


@compiles
@each_call
def test_machine_code(name):
    """What a launch needs, fits: 227 KiB of shared memory and 512 columns of tensor memory. Nothing spills."""
    made, code, ptx = compiled(*CALLS[name])
    assert code.local_bytes == 0
    assert code.shared_bytes <= 227 * 1024
    assert made.metadata.tmem_size <= 512
    persistent = not name.startswith("K") and "tail" not in name
    if not persistent:  # two programs on a multiprocessor
        assert code.shared_bytes <= 113 * 1024
        assert made.metadata.tmem_size <= 256
        assert code.registers <= 128
    assert re.search(r"tcgen05\.mma\S*kind::mxf8f6f4\S*block_scale", ptx)
    assert re.search(r"cp\.async\.bulk\.tensor\.5d\S*global", ptx)  # scales
    assert re.search(r"tcgen05\.cp\S*warpx4\.32x128b", ptx)
    assert ("cp.async.bulk.tensor.3d.global.shared" in ptx) == (not name.startswith("M"))  # the output
    # One tcgen05.st makes zeros of the sums. In a tail, two or three more store scales that passed through registers.
    assert len(re.findall(r"tcgen05\.st\.", ptx)) in ((1,) if persistent else (3, 4))
    assert len(re.findall(r"ld\.global", ptx)) == 0 or name.startswith(("M", "K"))  # offs alone
    assert not re.search(r"\b(STL|LDL)\b", dumped(made.asm["cubin"], "-sass"))


@compiles
@each_call
def test_barriers_expect_the_bytes_that_tma_brings(name):
    """A barrier that expects other bytes than its copies bring would hang."""
    made, _, ptx = compiled(*CALLS[name])
    wide = made.metadata.num_stages == 4 and "wide" in name
    codes, scales = (128 * 128, (256 if wide else 128) * 128), (512, 1024 if wide else 512)
    expected = {int(n) for n in re.findall(r"mbarrier\.arrive\.expect_tx\S* \S+, \[[^]]*\], (\d+)", ptx)}
    of_step = sum(codes) + sum(scales)
    assert of_step in expected
    assert expected <= {of_step, *codes, *scales}  # in a tail, each copy has its own barrier


@compiles
@pytest.mark.parametrize("dtypes", [(E4M3FN, E5M2), (E5M2, E4M3FN), (E5M2, E5M2)], ids=str)
def test_formats(dtypes):
    _, code, ptx = compiled("", 1024, torch.bfloat16, dtypes)
    assert code.local_bytes == 0
    assert re.search(r"tcgen05\.mma\S*block_scale", ptx)


@compiles
def test_warp_specialization_compiles():
    """It is off by default, because no GPU has run it."""
    assert not any(config["WARP_SPECIALIZE"] for config in kernel.CONFIGS.values())
    made, code, ptx = compiled("", 1024, torch.bfloat16, WARP_SPECIALIZE=True)
    assert code.local_bytes == 0
    assert code.shared_bytes <= 227 * 1024
    assert made.metadata.num_warps > kernel.CONFIGS["persistent, wide"]["num_warps"]
    assert re.search(r"tcgen05\.cp\S*", ptx)
    assert "setmaxnreg" in ptx


@compiles
@pytest.mark.parametrize("op", OPS)
def test_an_op_launches_it(op):
    name = "three groups, blocked, float32" if op != OPS[0] else "150x136x160, blocked, float32"
    case = next(case for case in own_cases(op) if case.name == name)
    for target, kernels in (("sm100", ["mx_matmul_sm100"]), ("sm90", ["_tiles"])):
        code = compile_case(op, "triton", case, target)
        assert (sorted({c.kernel for c in code}) == kernels) == (target == "sm100")
        assert not problems(code, kernel_ptx(op, target), (), edge=False)


def kernel_ptx(op, target):
    return dispatch.kernel_module(op, "triton").PTX[target]
