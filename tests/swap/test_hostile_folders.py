"""A folder of weights gives the saved tensors bit for bit; a damaged or hostile folder gives these or an
error that names it, and runs no code.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import errors
from lightning_megatron.checkpoint.hugging_face import import_model
from lightning_megatron.checkpoint.values import read_single_file
from lightning_megatron.cli import convert as cli_convert
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.swap import build_on_meta
from lightning_megatron.swap.weights.safetensors_file import DTYPES
from lightning_megatron.swap.weights.safetensors_folder import (
    INDEX,
    WEIGHTS,
    SafetensorsFolder,
)
from tests.data.test_damaged_files import Gadget
from tests.swap.families import transformers, twin_of

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
REFUSALS = (CorruptDataError, CheckpointMismatchError, UnsupportedError)


def saved_tensors() -> dict[str, Tensor]:
    # All sizes differ, because no header reveals an exchange of tensors of the same size.
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.weight": torch.randn(n + 1, 3, generator=generator) for n in range(6)}
    half = torch.randn(5, generator=generator).bfloat16()
    return {**weights, "half": half, "nothing": torch.empty(0, 4)}


def save_single_file(folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    content = saved_tensors() if tensors is None else tensors
    safetensors_torch.save_file(content, folder / WEIGHTS, metadata={"format": "pt"})
    return folder / WEIGHTS


def save_indexed_files(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    names = sorted(saved_tensors())
    weight_map = {name: FILES[number >= 3] for number, name in enumerate(names)}
    for file in FILES:
        part = {name: saved_tensors()[name] for name in names if weight_map[name] == file}
        safetensors_torch.save_file(part, folder / file)
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content))
    return folder / INDEX


def save_llama(folder: Path, **changes: Any) -> Path:
    twin_of("llama").save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


def opened(folder: Path | str) -> SafetensorsFolder:
    source = SafetensorsFolder(folder)
    source.check_types(source.names())
    return source


def check_folder(folder: Path, label: str) -> str:
    """Read a folder; return the text of the error, or an empty text if all tensors equal the saved
    ones.
    """
    refusal = None
    try:
        source = opened(folder)
        actual = {name: source.read(name) for name in source.names()}
    except errors.REFUSALS as error:
        refusal = str(error)
    if refusal is not None:
        assert str(folder) in refusal, f"{label}: the error names no file: {refusal}"
        return refusal
    assert actual.keys() == saved_tensors().keys(), label
    for name, tensor in saved_tensors().items():
        # The dtype and shape of an empty tensor may differ.
        is_empty = not actual[name].numel() and not tensor.numel()
        is_equal = actual[name].dtype == tensor.dtype and torch.equal(tensor, actual[name])
        assert is_empty or is_equal, f"{label}: {name} differs from the saved tensor"
    return ""


# ---- whole folders


def test_tensors_and_their_parts_equal_those_of_the_safetensors_library(tmp_path):
    tensors = {
        kind: torch.randint(0, 2 if kind == "BOOL" else 100, (7, 5, 3)).to(dtype)
        for kind, dtype in DTYPES.items()
    } | {"vector": torch.randn(9), "number": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    path = save_single_file(tmp_path, tensors)
    folder, before = SafetensorsFolder(tmp_path), path.read_bytes()
    slices = (
        (slice(2, 5), slice(0, 5), slice(0, 3)),
        (slice(6, 7), slice(1, 4), slice(2, 3)),
    )
    assert set(folder.names()) == set(tensors)
    with safetensors.safe_open(path, "pt") as theirs:
        for name, expected in tensors.items():
            assert folder.shape(name) == tuple(expected.shape)
            pairs = [(folder.read(name), theirs.get_tensor(name))]
            for part in slices if name in ("F32", "BF16", "I64", "BOOL") else ():
                pairs.append((folder.read(name, part), theirs.get_slice(name)[part]))
            for ours, their in pairs:
                assert folder.dtype_of(name) == ours.dtype == their.dtype
                assert ours.shape == their.shape
                bits = [x.contiguous().view(-1).view(torch.uint8) for x in (ours, their)]
                assert torch.equal(*bits), name
    assert folder.read("F32", (slice(3, 3), slice(0, 5), slice(0, 3))).shape == (0, 5, 3)
    folder.read("F32").zero_()
    assert path.read_bytes() == before, "a read tensor is a copy"


def test_several_files_are_read_as_one_and_missing_ones_are_named(tmp_path):
    with pytest.raises(CheckpointMismatchError, match="has neither"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="nothing is downloaded"):
        SafetensorsFolder("meta-llama/Llama-3.1-8B")
    index = save_indexed_files(tmp_path)
    assert not check_folder(tmp_path, "indexed")
    with pytest.raises(CheckpointMismatchError, match="must have a config.json"):
        _ = SafetensorsFolder(tmp_path).config
    with pytest.raises(CheckpointMismatchError, match="has no 'absent'. It has 'half'"):
        SafetensorsFolder(tmp_path).read("absent")
    content = json.loads(index.read_text())
    weights = content["weight_map"]
    without_half = {name: file for name, file in weights.items() if name != "half"}
    without_file = {name: file for name, file in weights.items() if file != FILES[1]}
    for weight_map, message in (
        ({**weights, "absent": FILES[0]}, f"'absent in {FILES[0]}' of .* only in one"),
        (without_half, f"'half in {FILES[0]}' of .* only in one"),
        (without_file, r"it names 1 of the 2 files model-...-of-00002 of"),
    ):
        index.write_text(json.dumps({**content, "weight_map": weight_map}))
        with pytest.raises(CheckpointMismatchError, match=message):
            SafetensorsFolder(tmp_path)
    (tmp_path / FILES[1]).unlink()
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointMismatchError, match=f"lacks '{FILES[1]}' of 2"):
        SafetensorsFolder(tmp_path)


# ---- headers and indexes

ODD_VALUES: tuple[Any, ...] = (
    0, 1, -1, 7, 2**31, 2**63, 2**70, 10**400, 1.5, True, None, "", "x", [], [1], [0, 4], [8, 4], {},
)  # fmt: skip
ODD_TYPES = ("I32", "F64", "I64", "BF16", "F8_E4M3", "F4", "C64", "U32", "BOOL", "f32", ["F32"])
ODD_FILES = ("../x.safetensors", ".", "..", FILES[0], "\0", INDEX)


def split_file(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_file(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
MALFORMED: tuple[bytes, ...] = (
    b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 100_000, b'{"a": NaN}', b'{"a\xff": 1}',
    b"{%s}" % ENTRY.replace(b"[2]", b"[" + b"9" * 5000 + b"]"), b"[]", b"null", b'"\\ud800"',
)  # fmt: skip


def places_of(nest: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of everything inside JSON."""
    if isinstance(nest, dict | list):
        for key in nest if isinstance(nest, dict) else range(len(nest)):
            yield nest, key
            yield from places_of(nest[key])


def edit(nest: Any, draw: random.Random, values: tuple[Any, ...]) -> str:
    """Change or drop something inside JSON, and describe the change."""
    container, key = draw.choice(list(places_of(nest)))
    old, new = container.pop(key), draw.choice(values)
    if isinstance(old, int):
        new = draw.choice((new, old + 1, old + 4))
    if isinstance(container, list):
        container.insert(key, new)
    elif draw.random() < 0.8:
        container[key] = new
    return f"{key}: {old!r} becomes {new!r}"[:200]


def test_edited_headers_indexes_and_bytes_are_refused_or_give_the_saved_tensors(tmp_path):
    path, num_refused = save_single_file(tmp_path / "file"), 0
    content = path.read_bytes()
    header, data = split_file(content)
    for seed in range(200):
        changed, draw = copy.deepcopy(header), random.Random(seed)
        change = edit(changed, draw, ODD_VALUES + ODD_TYPES)
        # Loading a model detects a missing empty tensor.
        if "nothing" in changed:
            path.write_bytes(join_file(changed, data))
            num_refused += bool(check_folder(path.parent, f"seed {seed}, {change}"))
    assert num_refused > 120
    names = "".join(header).encode()
    for seed in range(200):
        draw = random.Random(seed)
        flipped, position = bytearray(content), draw.randrange(len(content) - len(data))
        if content[position : position + 1] not in names:  # perhaps part of a name
            flipped[position] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            check_folder(path.parent, f"bit of byte {position}, seed {seed}")
    for text in MALFORMED:
        path.write_bytes(join_file(text, bytes(8)))
        assert check_folder(path.parent, str(text[:40]))
    lengths = (0, 1, 7, 8, 9, 40, len(content) - 1)
    for damaged in (*(content[:n] for n in lengths), content + b"x", content + content):
        path.write_bytes(damaged)
        assert check_folder(path.parent, f"{len(damaged)} bytes")

    path, num_refused = save_indexed_files(tmp_path / "files"), 0
    index = json.loads(path.read_text())
    for seed in range(100):
        edited = copy.deepcopy(index)
        change = edit(edited, random.Random(seed), ODD_VALUES + ODD_FILES)
        path.write_text(json.dumps(edited))
        num_refused += bool(check_folder(path.parent, f"seed {seed}: {change}"))
    assert num_refused > 60


def test_weights_must_be_floating_point_numbers_of_one_type_of_a_width(tmp_path):
    for tensors, phrase in (
        ({"a": torch.ones(2, dtype=torch.int32)}, "'a' of .* is torch.int32"),
        (
            {"a": torch.ones(2).bfloat16(), "b": torch.ones(2).half()},
            "'a' of .*, and 'b' torch.float16",
        ),
    ):
        save_single_file(tmp_path, tensors)
        with pytest.raises(CorruptDataError, match=phrase):
            opened(tmp_path)


MALFORMED_INDEXES = (
    "", "{", "[]", "null", '{"weight_map": {}}', "{}", '{"weight_map": {"a": NaN}}', "[" * 100_000, '{"weight_map": 3}',
    '{"weight_map": ' + '{"a": ' * 50 + '"x"' + "}" * 51, '{"weight_map": {"a": "\\ud800.safetensors"}}',
)  # fmt: skip
OTHER_FILES = (
    "../secret.safetensors", "/{0}/secret.safetensors", "..", ".", "", ".hidden.safetensors", "a/b.safetensors",
    "a\\b.safetensors", "a\0.safetensors", "secret.bin", "x" * 5000 + ".safetensors",
)  # fmt: skip


def test_malformed_indexes_and_entries_outside_of_the_folder_are_refused(tmp_path):
    path = save_indexed_files(tmp_path / "model")
    valid = path.read_text()
    for text in MALFORMED_INDEXES:
        path.write_text(text)
        with pytest.raises(CorruptDataError, match=str(path)):
            SafetensorsFolder(path.parent)
    path.write_text(valid.replace('"weight_map": {', f'"weight_map": {{"half": "{FILES[1]}", '))
    with pytest.raises(CorruptDataError, match="the key 'half' occurs twice"):
        SafetensorsFolder(path.parent)
    secret = tmp_path / "secret.safetensors"
    safetensors_torch.save_file({"secret": torch.ones(2)}, secret)
    shutil.copy(secret, path.parent / "secret.bin")
    for name in OTHER_FILES:
        index = json.loads(valid)
        index["weight_map"]["secret"] = name.format(tmp_path)
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointMismatchError, match="of its own folder|lacks"):
            SafetensorsFolder(path.parent)


def test_symbolic_file_links_are_followed_only_in_the_hugging_face_cache(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "linked"
    save_indexed_files(outside)
    folder.mkdir()
    shutil.copy(outside / INDEX, folder)
    for file in FILES:
        (folder / file).symlink_to(outside / file)
    with pytest.raises(CheckpointMismatchError, match="links to files elsewhere.*hard links"):
        SafetensorsFolder(folder)
    for file in FILES:
        (folder / file).unlink()
        os.link(outside / file, folder / file)
    assert not check_folder(folder, "hard links")
    cache = tmp_path / "hub" / "models--org--name"
    for part in ("blobs", "snapshots/0123"):
        (cache / part).mkdir(parents=True)
    for number, file in enumerate((INDEX, *FILES)):
        shutil.copy(outside / file, cache / "blobs" / f"hash{number}")
        (cache / "snapshots" / "0123" / file).symlink_to(Path("../../blobs") / f"hash{number}")
    assert not check_folder(cache / "snapshots" / "0123", "the cache")


def test_paths_that_are_not_files_are_refused_without_waiting(tmp_path):
    for number, name in enumerate((WEIGHTS, INDEX, FILES[0])):
        folder = tmp_path / str(number)
        (save_single_file if name == WEIGHTS else save_indexed_files)(folder)
        for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name)):
            path = folder / name
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            make(path)
            with pytest.raises(errors.REFUSALS, match=str(folder)):
                SafetensorsFolder(folder)


# ---- configurations


def test_configuration_files_must_be_strict_json_of_limited_size_and_depth(tmp_path):
    folder = save_llama(tmp_path / "model")
    path, valid = folder / "config.json", (folder / "config.json").read_text()
    deep, long = '"a": ' + "[" * 40 + "]" * 40, '{"x": "' + "x" * 10_000_000 + '"}'
    begun = valid.replace("{", "{%s, ", 1)
    texts = ["", "[]", "null", valid[:50], '{"a":' * 3000, long, "[" * 100_000, "\ud800"]
    texts += [begun % part for part in ('"vocab_size": 7', '"a": NaN', '"a": 1e999', deep)]
    for number, text in enumerate(texts):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(CorruptDataError, match=r"model/config\.json"):
            import_model(folder, tmp_path / f"out{number}")
        assert not (tmp_path / f"out{number}").exists()
    for changes, message in (
        ({"intermediate_size": -3}, r"config\.json: ffn_hidden_size must be .* it is -3"),
        ({"num_hidden_layers": 10**9}, r"config\.json: num_hidden_layers must be .* 1000000000"),
        ({"rms_norm_eps": -1.0}, r"config\.json: norm_eps must be .* it is -1.0"),
        ({"hidden_size": "3"}, "'hidden_size' expected int, got str"),
        ({"rope_parameters": 3}, "'rope_parameters' with value 3"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "factor must be .* 'x'"),
    ):
        save_llama(folder, **changes)
        with pytest.raises(CheckpointMismatchError, match=message), build_on_meta():
            transformers.LlamaForCausalLM.from_pretrained(folder)


# ---- code


def pickle_to(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("write", [torch.save, pickle_to])
def test_pickles_are_refused_without_running_code(write, tmp_path):
    trap, path = tmp_path / "sprung", tmp_path / "last.ckpt"
    content = {"state_dict": {"weight": Gadget(trap)}}
    write(content, path)
    with pytest.raises((CorruptDataError, UnsupportedError), match="last.ckpt"):
        read_single_file(path)
    folder = save_llama(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors"):
        write(content, folder / name)
        with pytest.raises(errors.REFUSALS, match="model"):
            SafetensorsFolder(folder)
        with pytest.raises(errors.REFUSALS):
            cli_convert.convert(str(folder), str(tmp_path / "out"))
        (folder / name).unlink()
    assert not trap.exists()
    if write is torch.save:
        read_single_file(path, weights_only=False)  # the trap springs if the user allows code
        assert trap.exists()


def test_code_that_a_configuration_names_does_not_run(tmp_path):
    trap = tmp_path / "sprung"
    parts = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    code = {"auto_map": dict.fromkeys(parts, "trap.Trap")}
    folder = save_llama(tmp_path / "model", **code)
    for file in ("trap.py", "__init__.py", "sitecustomize.py"):
        (folder / file).write_text(f"import os\nos.mkdir({str(trap)!r})\nclass Trap: pass\n")
    import_model(folder, tmp_path / "out")
    cli_convert.convert(str(tmp_path / "out"), str(tmp_path / "again"), verify=True)
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())
    save_llama(folder, **code, trust_remote_code=True)
    with pytest.raises(UnsupportedError, match="trust_remote_code of the configuration must"):
        import_model(folder, tmp_path / "trusted")
    assert not trap.exists()
