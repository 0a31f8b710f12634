"""The headers of safetensors files are untrusted: each defect is named before any byte of a tensor is read."""

import json
import os
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mxspec.checkpoint.files import scan
from mxspec.checkpoint.headers import BITS, CheckpointError, read_header
from mxspec.checkpoint.reading import Checkpoint


def raw(path, header, data=b"", size=None):
    """A file with this header, which may be a text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


def tensor(shape, begin, end, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "shorter than 8 bytes": (lambda p: p.write_bytes(b"1234"), "the file is shorter than 8 bytes"),
    "header longer than the file": (lambda p: raw(p, "{}", size=1 << 20), "said to have 1048576 bytes"),
    "header of 2^63 bytes": (lambda p: raw(p, "{}", size=1 << 63), "said to have 9223372036854775808 bytes"),
    "truncated header": (lambda p: raw(p, '{"a": {"dtype":'), "Expecting value"),
    "no UTF-8": (lambda p: p.write_bytes((4).to_bytes(8, "little") + b'{"\xff"'), "codec"),
    "no object": (lambda p: raw(p, "[]"), "not a JSON object"),
    "deep": (lambda p: raw(p, "[" * 200_000), "recursion"),
    "name twice": (lambda p: raw(p, '{"a": 1, "a": 2}'), "has 'a' twice"),
    "tensor is a number": (lambda p: raw(p, {"a": 1}), "a is not an object with exactly dtype"),
    "without offsets": (lambda p: raw(p, {"a": {"dtype": "U8", "shape": []}}), "a is not an object with exactly dtype"),
    "unknown dtype": (lambda p: raw(p, {"a": tensor([1], 0, 1, "F9")}, b"1"), "has the dtype 'F9'"),
    "dtype is a list": (lambda p: raw(p, {"a": tensor([1], 0, 1, ["U8"])}, b"1"), r"has the dtype \['U8'\]"),
    "negative size": (lambda p: raw(p, {"a": tensor([-1, -1], 0, 1)}, b"1"), "needs lists of numbers from 0"),
    "size is true": (lambda p: raw(p, {"a": tensor([True], 0, 1)}, b"1"), "needs lists of numbers from 0"),
    "size is a fraction": (lambda p: raw(p, {"a": tensor([1.0], 0, 1)}, b"1"), "needs lists of numbers from 0"),
    "one offset": (lambda p: raw(p, {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"1"), "do not fit U8"),
    "offsets backwards": (lambda p: raw(p, {"a": tensor([0], 1, 0)}, b"1"), "do not fit U8"),
    "shape against offsets": (lambda p: raw(p, {"a": tensor([2, 2], 0, 4, "BF16")}, b"1234"), "do not fit BF16"),
    "half a byte": (lambda p: raw(p, {"a": tensor([3], 0, 1, "F4")}, b"1"), "do not fit F4"),
    "larger than the file": (lambda p: raw(p, {"a": tensor([1 << 40], 0, 1 << 40)}, b"1"), "in 1 bytes"),
    "product overflows": (lambda p: raw(p, {"a": tensor([1 << 32, 1 << 32], 0, 0)}), "do not fit U8"),
    "overlap": (lambda p: raw(p, {"a": tensor([3], 0, 3), "b": tensor([3], 2, 5)}, b"12345"), "a and b overlap"),
    "gap": (lambda p: raw(p, {"a": tensor([1], 0, 1), "b": tensor([1], 3, 4)}, b"1234"), "2 bytes between a and b"),
    "rest": (lambda p: raw(p, {"a": tensor([1], 0, 1)}, b"1234"), "3 bytes after a belong to no tensor"),
    "metadata of numbers": (lambda p: raw(p, {"__metadata__": {"a": 1}}), "__metadata__ is not an object of strings"),
}


@pytest.mark.parametrize("defect", HEADERS)
def test_a_header_with_a_defect_is_refused_by_name(tmp_path, defect):
    make, words = HEADERS[defect]
    path = tmp_path / "model.safetensors"
    make(path)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{words}"):
        Checkpoint.open(tmp_path)
    assert [problem.where for problem in scan(path).problems] == ["model.safetensors"]


def shards(folder, index=None):
    """Two shards with a tensor each, and their index."""
    save_file({"a": torch.zeros(2)}, folder / "1.safetensors")
    save_file({"b": torch.zeros(3)}, folder / "2.safetensors")
    named = {"a": "1.safetensors", "b": "2.safetensors"} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def link_out(folder):
    shards(folder)
    (folder / "1.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "1.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


def both_hold_a(folder):
    shards(folder)
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, folder / "2.safetensors")


def text(name, said):
    return lambda folder: [shards(folder), (folder / name).write_text(said)]


DIRECTORIES = {
    "missing shard": (lambda f: [shards(f), (f / "2.safetensors").unlink()], r"lacks the shard 2\.safetensors"),
    "absolute path": (lambda f: shards(f, {"a": "/etc/x.safetensors"}), "leaves the directory"),
    "parent": (lambda f: shards(f, {"a": "../1.safetensors"}), "leaves the directory; needs the name"),
    "link": (link_out, "is a link that leaves the directory"),
    "null in the name": (lambda f: shards(f, {"a": "1\0.safetensors"}), "is not a path|null"),
    "pickle by the index": (lambda f: shards(f, {"a": "pytorch_model.bin"}), "pickles are not read"),
    "entry in no file": (
        lambda f: shards(f, {"a": "1.safetensors", "c": "2.safetensors"}),
        "c: is in 2.safetensors by the index, but no file has it",
    ),
    "wrong shard": (
        lambda f: shards(f, {"a": "2.safetensors", "b": "1.safetensors"}),
        "a: is in 2.safetensors by the index; it is in 1.safetensors",
    ),
    "two shards": (both_hold_a, "a: is in two shards"),
    "index of numbers": (lambda f: shards(f, {"a": 1}), "has no weight_map"),
    "index no JSON": (text("model.safetensors.index.json", "{"), "Expecting property name"),
    "config no object": (text("config.json", "[]"), r"config\.json: is a JSON list"),
    "quantization_config a list": (text("config.json", '{"quantization_config": [1]}'), r"'\[1\]'; needs an object"),
    "pickles alone": (
        lambda f: (f / "pytorch_model.bin").write_bytes(b"cos"),
        "it holds pytorch_model",
    ),
    "empty": (lambda f: None, "holds no safetensors file"),
    "folder as a shard": (lambda f: (f / "1.safetensors").mkdir(), "is not a plain file"),
    "pipe as a shard": (lambda f: os.mkfifo(f / "1.safetensors"), "is not a plain file"),
}


@pytest.mark.parametrize("defect", DIRECTORIES)
def test_a_directory_with_a_defect_is_refused_by_name(tmp_path, defect):
    make, words = DIRECTORIES[defect]
    (tmp_path / "model").mkdir()
    make(tmp_path / "model")
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path / "model")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_a_pickle_is_refused_and_never_opened(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    os.mkfifo(path)  # opening it would wait for ever
    with pytest.raises(CheckpointError, match="files that hold pickles are not read; needs a safetensors file"):
        Checkpoint.open(path)


def test_links_of_the_cache_of_the_hub_are_taken(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert Checkpoint.open(snapshot).read("a").tolist() == [1, 1]
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../outside")
    with pytest.raises(CheckpointError, match="leaves the directory"):
        Checkpoint.open(snapshot)


def test_every_dtype_of_safetensors_is_read_as_it_is_stored(tmp_path):
    tensors = {
        str(dtype): torch.arange(32, dtype=torch.uint8).view(dtype).reshape(2, -1)
        for dtype in (
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e8m0fnu,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
            torch.uint8,
            torch.int8,
            torch.bfloat16,
            torch.float16,
            torch.float32,
            torch.float64,
            torch.int64,
            torch.uint16,
            torch.uint32,
            torch.uint64,
            torch.complex64,
        )
    }
    tensors["empty"], tensors["scalar"] = torch.empty(0, 3), torch.tensor(2.5)
    tensors["f4"] = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "model.safetensors")
    assert checkpoint.tensors["f4"].shape == (2, 8)
    assert checkpoint.read("f4").tolist() == list(range(8))
    with pytest.raises(CheckpointError, match="has the dtype F4, which torch does not have"):
        _ = checkpoint.tensors["f4"].dtype
    for name, expected in tensors.items():
        if name != "f4":
            got = checkpoint.read(name)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert got.view(-1).view(torch.uint8).equal(expected.view(-1).view(torch.uint8)), name
    assert checkpoint.read_rows("torch.bfloat16", 1, 2).equal(tensors["torch.bfloat16"][1:])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 65) | st.floats() | st.text(max_size=4) | st.sampled_from([*BITS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS]) | json_values,
        "shape": st.lists(st.integers(0, 9), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | json_values,
    }
)


@settings(max_examples=150, deadline=None)
@given(header=st.dictionaries(st.text(max_size=3), entries | json_values, max_size=4), data=st.binary(max_size=40))
def test_any_header_is_read_or_refused(tmp_path_factory, header, data):
    path = raw(tmp_path_factory.getbasetemp() / "fuzz.safetensors", header, data)
    try:
        tensors, _ = read_header(path, path.name)
    except CheckpointError:
        return
    checkpoint = Checkpoint.open(path)
    used = sum(checkpoint.read_bytes(name, 0, sys.maxsize).numel() for name in tensors)
    assert used == len(data)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    path.write_bytes(data)
    try:
        tensors, _ = read_header(path, path.name)
    except CheckpointError:
        return
    assert all(entry.end <= len(data) for entry in tensors.values())
