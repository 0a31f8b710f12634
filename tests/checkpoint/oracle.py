"""The values that a loader must return: the plain weights, quantized and read back without mxspec."""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M3 = torch.tensor([n / 8 for n in range(16)] + [n / 4 for n in range(8, 16)] + [n / 2 for n in range(8, 16)])
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def blocks_of(x, height, width):
    """`(rows, height, columns, width)`, padded with zeros."""
    n, k = x.shape
    padded = torch.zeros(-(-n // height) * height, -(-k // width) * width)
    padded[:n, :k] = x.float()
    return padded.view(padded.shape[0] // height, height, -1, width)


def read_back(blocks, shape):
    n, k = shape
    rows, height, columns, width = blocks.shape
    return blocks.reshape(rows * height, columns * width)[:n, :k].bfloat16()


def fp8_128(x, scales="fp32", rule="contract"):
    blocks = blocks_of(x, 128, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    if rule == "deepseek":
        s = amax / torch.full_like(amax, 448.0)
        return read_back((blocks / s).to(torch.float8_e4m3fn).float() * s, x.shape)
    if rule == "compressed_tensors":  # the dtype of the weight is bfloat16, and so are the scale and the quotient
        s = amax.bfloat16() / torch.full_like(amax, 448.0).bfloat16()
        q = (blocks.bfloat16() / s).to(torch.float8_e4m3fn)
        return read_back(q.float() * s.float(), x.shape)
    factor = torch.full_like(amax, 448.0) / amax
    if scales == "ue8m0":
        factor = torch.exp2(torch.floor(torch.log2(factor.double()))).float()
    return read_back((blocks * factor).to(torch.float8_e4m3fn).float() * (1 / factor), x.shape)


def mx(x, largest):
    """Rounded up scales, 2^ceil(log2(amax / largest)), in double precision."""
    blocks = blocks_of(x, 1, 32)
    amax = blocks.abs().amax(3, keepdim=True).double()
    scale = torch.exp2(torch.ceil(torch.log2(amax / largest))).float()
    scaled = blocks / scale
    if largest == 448:
        return read_back(scaled.to(torch.float8_e4m3fn).float() * scale, x.shape)
    return read_back(e2m1(scaled, E2M1 if largest == 6 else E2M3) * scale, x.shape)


def e2m1(scaled, values=E2M1):
    """The nearest values of e2m1, or of another format whose values that are not negative are given in order."""
    middles = ((values[1:] + values[:-1]) / 2).to(scaled.dtype)
    low = torch.bucketize(scaled.abs(), middles)  # the number of middles below
    high = torch.bucketize(scaled.abs(), middles, right=True)
    code = torch.where(low % 2 == 0, low, high)  # a tie goes to the even code
    return torch.copysign(values[code].to(scaled.dtype), scaled).float()


def nvfp4(x, amax):
    """Both quotients in double precision; compressed-tensors reads `q * (s / G)`."""
    blocks, amax = blocks_of(x, 1, 16).double(), amax.double()
    s = (448 * blocks.abs().amax(3, keepdim=True) / amax).float().to(torch.float8_e4m3fn).float()
    q = e2m1(2688 * blocks / (s.double() * amax))
    return read_back(q * (s / (2688 / amax).float()), x.shape)


def layer_amax(plain, name):
    """The largest magnitude of the weights that engines fuse with a weight."""
    leaves = [
        fused for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if name.split(".")[-2] in fused
    ]
    head = name.removesuffix(".weight").rpartition(".")[0]
    names = [f"{head}.{leaf}.weight" for leaf in leaves[0]] if leaves else [name]
    return max(plain[other].abs().amax() for other in names)


def weights(plain, family, scales="fp32", rule="contract"):
    """The weights of a model by transformers' names, from its plain weights as they are stored."""
    quantize = {
        "fp8_block": lambda x: fp8_128(x, scales, rule),
        "ct_fp8_block": lambda x: fp8_128(x, scales, rule),
        "mxfp8": lambda x: mx(x, 448),
        "ct_mxfp8": lambda x: mx(x, 448),
        "ct_mxfp4": lambda x: mx(x, 6),
        "ct_mxfp6": lambda x: mx(x, 7.5),
        "gptoss_mxfp4": lambda x: mx(x, 6),
    }.get(family)
    seen = {}
    for name, x in plain.items():
        if family == "ct_nvfp4":
            seen[name] = nvfp4(x, layer_amax(plain, name)) if name.endswith("_proj.weight") else x
        elif family == "gptoss_mxfp4":
            experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            seen[name] = torch.stack([quantize(e.mT).mT for e in x]) if experts else x
        else:
            linear = name.endswith("_proj.weight")
            seen[name] = quantize(x) if linear else x
    return fused(seen)


def fused(seen):
    """transformers keeps the experts of Qwen3-MoE in two tensors."""
    result, experts = {}, {}
    for name, x in seen.items():
        head, mark, rest = name.partition(".mlp.experts.")
        if mark and rest[0].isdigit():
            index, projection, _ = rest.split(".")
            experts.setdefault(f"{head}.mlp.experts", {})[int(index), projection] = x
        else:
            result[name] = x
    for head, parts in experts.items():
        count = 1 + max(index for index, _ in parts)
        gate_up = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)]
        result[f"{head}.gate_up_proj"] = torch.stack(gate_up)
        result[f"{head}.down_proj"] = torch.stack([parts[i, "down_proj"] for i in range(count)])
    return result
