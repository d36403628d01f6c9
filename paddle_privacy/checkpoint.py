"""Checkpoints that are whole or refused: safetensors for tensors, JSON for everything else, nothing pickled.

A checkpoint is a directory::

    checkpoint.json             the manifest: format, checksums, and all state that is not a tensor
    model-<id>.safetensors      the model's state_dict
    optimizer-<id>.safetensors  accumulators and master weights

The manifest is replaced last and in one move, so a process killed at any point leaves the old checkpoint or the new
one. Loading verifies every byte and every shape before it changes anything.

Neither noise nor sampling state is stored: a resumed run takes fresh randomness from the operating system. Steps that
were taken after the checkpoint was written are lost to the weights but not to the budget: where the optimizer keeps a
ledger, loading composes whatever the ledger holds beyond the checkpoint. Without a ledger nobody can know of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, Union

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.base import unique_name

from paddle_privacy.errors import PrivacyError

FORMAT = "paddle-privacy-checkpoint/1"
MANIFEST = "checkpoint.json"
PathLike = Union[str, "os.PathLike[str]"]

_DTYPES = {
    "F64": paddle.float64,
    "F32": paddle.float32,
    "F16": paddle.float16,
    "BF16": paddle.bfloat16,
    "I64": paddle.int64,
    "I32": paddle.int32,
    "I16": paddle.int16,
    "I8": paddle.int8,
    "U8": paddle.uint8,
    "BOOL": paddle.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def save_checkpoint(path: PathLike, *, model: nn.Layer, optimizer: Any, extra: dict[str, Any] | None = None) -> None:
    """Write ``model`` and ``optimizer`` (with its accountant, schedule and adaptive bounds) to the directory ``path``.

    Args:
        path: created where missing. An earlier checkpoint there stays good until this one is complete.
        optimizer: under data parallelism rank 0 writes, and the call does nothing on the other ranks, whose state is
            the same; where states are sharded, every rank must make the call, and sends what it holds.
        extra: anything JSON can hold, returned by :func:`load_checkpoint`; the epoch number, for one.

    Raises:
        TypeError: a part of the state is neither a tensor nor JSON.
    """
    shared = getattr(optimizer, "_shared", None)
    if shared is not None and not shared.ranks.leader:
        shared.take_part_in_saving(optimizer, keep=False)
        return
    state = optimizer.state_dict()
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    identity = secrets.token_hex(8)
    tensors: dict[str, Tensor] = {}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "parameters": {name: p.name for name, p in model.named_parameters()},
        "optimizer": _strip(state, "", tensors),
        "extra": {} if extra is None else extra,
        "files": {},
    }
    json.dumps(manifest, default=_refuse)  # what JSON cannot hold is refused before a file is written
    for kind, content in (("model", dict(model.state_dict())), ("optimizer", tensors)):
        name = f"{kind}-{identity}.safetensors"
        data = _serialize(content)
        _write_durably(directory / name, data)
        manifest["files"][kind] = {"name": name, "sha256": hashlib.sha256(data).hexdigest()}
    manifest["sha256"] = _manifest_digest(manifest)
    temporary = directory / f".{MANIFEST}-{identity}"
    _write_durably(temporary, json.dumps(manifest, default=_refuse, indent=1).encode())
    _sync_directory(directory)
    os.replace(temporary, directory / MANIFEST)
    _sync_directory(directory)
    current = {entry["name"] for entry in manifest["files"].values()}
    for old in (*directory.glob("*-*.safetensors"), *directory.glob(f".{MANIFEST}-*")):
        if old.name not in current:
            old.unlink(missing_ok=True)


def load_checkpoint(path: PathLike, *, model: nn.Layer, optimizer: Any) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` wrote; returns its ``extra``.

    Parameters are matched by their path in the model, so the process may have numbered them differently.

    Raises:
        PrivacyError: there is no checkpoint, or it is damaged, incomplete, or of another model, or its run kept a
            ledger and ``optimizer`` does not continue it. Nothing has been changed then.
    """
    manifest, model_tensors, optimizer_tensors = _read(Path(path))
    _check_fits(manifest, model_tensors, model)
    renamed = {old: dict(model.named_parameters())[name].name for name, old in manifest["parameters"].items()}
    state = _rename(_fill(manifest["optimizer"], optimizer_tensors), renamed, optimizer)
    optimizer.set_state_dict(state)
    model.set_state_dict(model_tensors)
    return manifest["extra"]


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise PrivacyError(f"there is no checkpoint at {directory}: {MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise PrivacyError(f"the checkpoint at {directory} is damaged: {MANIFEST}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PrivacyError(f"{directory / MANIFEST} is not of the format {FORMAT}")
    if manifest.get("sha256") != _manifest_digest(manifest):
        raise PrivacyError(f"the checkpoint at {directory} is damaged: {MANIFEST} does not match its checksum")
    contents = []
    for kind in ("model", "optimizer"):
        entry = manifest["files"][kind]
        file = directory / Path(entry["name"]).name
        try:
            data = file.read_bytes()
        except OSError as error:
            raise PrivacyError(f"the checkpoint at {directory} is incomplete: {error}") from error
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise PrivacyError(f"the checkpoint at {directory} is damaged: {file.name} does not match its checksum")
        contents.append(_deserialize(data))
    return manifest, contents[0], contents[1]


def _check_fits(manifest: dict[str, Any], tensors: dict[str, Tensor], model: nn.Layer) -> None:
    own = model.state_dict()
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    missing += sorted(dict(model.named_parameters()).keys() ^ manifest["parameters"].keys())
    shapes = sorted(k for k in own.keys() & tensors.keys() if own[k].shape != tensors[k].shape)
    if missing or foreign or shapes:
        raise PrivacyError(
            f"the checkpoint is of another model: it lacks {missing[:5]}, has {foreign[:5]} besides, and "
            f"{shapes[:5]} have other shapes"
        )


def _strip(state: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The state with its tensors taken out into ``tensors``; keys keep their type of string."""
    if isinstance(state, Tensor):
        tensors[path] = state
        return {"__tensor__": path}
    if isinstance(state, dict):
        if not all(isinstance(key, str) for key in state):
            raise TypeError(f"optimizer state '{path}' has keys that are not strings")
        return {key: _strip(value, f"{path}/{key}", tensors) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_strip(value, f"{path}/{i}", tensors) for i, value in enumerate(state)]
    if isinstance(state, np.generic):
        return state.item()
    return state


def _fill(state: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(state, dict):
        if state.keys() == {"__tensor__"}:
            return tensors[state["__tensor__"]]
        return {key: _fill(value, tensors) for key, value in state.items()}
    if isinstance(state, list):
        return [_fill(value, tensors) for value in state]
    return state


def _rename(state: dict[str, Any], renamed: dict[str, str], optimizer: Any) -> dict[str, Any]:
    """The state under the names that parameters and accumulators have, or will get, in this process.

    Paddle looks accumulators up by "<parameter>_<accumulator>_<how many of that name came before>", and starts from
    zero in silence where it finds none.
    """
    by_length = sorted(renamed, key=len, reverse=True)
    existing = {v.name for of_kind in optimizer._accumulators.values() for v in of_kind.values()}

    def new_key(key: str) -> str:
        old = next((old for old in by_length if key.startswith(old + "_")), None)
        stem, _, number = key.rpartition("_")
        if old is None or not number.isdigit():
            return key
        base = renamed[old] + stem[len(old) :]
        held = [name for name in existing if name.rpartition("_")[0] == base]
        return held[0] if held else f"{base}_{unique_name.generator.ids.get(base, 0)}"

    out: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            out[new_key(key)] = value
        elif key == "master_weights":
            out[key] = {renamed.get(name, name): master for name, master in value.items()}
        else:
            out[key] = value
    return out


def _serialize(tensors: dict[str, Tensor]) -> bytes:
    """The safetensors format: a JSON header (its length first, u64 little endian) and the raw little-endian data."""
    header: dict[str, Any] = {}
    blobs = []
    offset = 0
    for name, tensor in tensors.items():
        blob = np.ascontiguousarray(tensor.numpy()).tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *blobs])


def _deserialize(data: bytes) -> dict[str, Tensor]:
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:end]).items():
        first, last = entry["data_offsets"]
        values = np.frombuffer(data[end + first : end + last], dtype=_NUMPY[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            tensors[name] = paddle.to_tensor(values.view(np.int16)).view(paddle.bfloat16)
        else:
            tensors[name] = paddle.to_tensor(values)
    return tensors


def _refuse(value: Any) -> Any:
    raise TypeError(f"a checkpoint holds tensors and JSON, got {type(value).__name__}: {value!r}")


def _manifest_digest(manifest: dict[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=_refuse).encode()).hexdigest()


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
