"""Digests of a model's weights by content: all copies of a model have the same digest, wherever they are.

By default a digest is sampled. It covers each file's name, size, header and end, and pieces of its tensors. Of a
safetensors file it covers the whole header, and so each tensor's name, type, shape and place. docs/identity.md names
the changes that a sampled digest can miss.
Digests are kept in a small file, by path, size, times and inode, so that a restart reads no weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from undercroft.patience import LIMIT_S, within

_Result = TypeVar("_Result")

SAMPLED, FULL = "sampled", "full"

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
_SMALL = 16 << 20
"""Files up to this size are hashed whole."""
_PIECE = 4096
_PIECES = 256
"""Number of pieces that are sampled of a file."""
_EDGE = 1 << 20
"""Bytes that are hashed at each end of a file without a safetensors header. A PyTorch file is a zip archive: its end
holds a CRC-32 of each tensor. A GGUF file starts with its metadata."""
_HEADER_MAX = 100 << 20
"""Most bytes of a safetensors header: vLLM's safetensors library refuses longer headers."""
_THREADS = 8
_KEPT_MAX = 4096
"""Most digests in a file of digests."""
_MODELS_MAX = 64
"""Most models in a file of digests for which it holds each file's digest, so that a log line can name differences."""


@dataclass(slots=True)
class Digests:
    """Digests of files, remembered by path, size, times and inode; in a JSON file if ``path`` names one.

    A change of a file that changes none of these goes unnoticed. Programs such as ``cp -p`` and ``rsync -t`` keep the
    modification time, but cannot set the inode's change time.
    """

    path: Path | None = None
    _known: dict[str, list[Any]] = field(default_factory=dict)
    _models: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the digest of a model's weights: the digest of each of its files, by file name."""
    _changed: bool = False

    def of_files(self, files: Iterable[Path], how: str) -> dict[Path, str]:
        """The digest of each file. ``how``: "sampled" or "full". Raises OSError for a file that cannot be read."""
        self._load()
        found: dict[Path, str] = {}
        missing: list[tuple[Path, list[Any]]] = []
        for path in files:
            key = _key(path, how)
            known = self._known.get(str(path))
            if known is not None and known[:-1] == key:
                found[path] = known[-1]
            else:
                missing.append((path, key))
        if missing:
            compute = _full if how == FULL else _sampled
            with ThreadPoolExecutor(min(_THREADS, len(missing)), "undercroft-digest") as pool:
                digests = list(pool.map(compute, [path for path, _ in missing]))
            for (path, key), digest in zip(missing, digests, strict=True):
                found[path] = digest
                # The entry moves to the end: the entries at the start are dropped first.
                self._known.pop(str(path), None)
                self._known[str(path)] = [*key, digest]
            self._changed = True
        return found

    def note_model(self, digest: str, files: dict[str, str]) -> None:
        """Remember the files of the weights with ``digest``."""
        if digest not in self._models:
            self._models[digest] = files
            self._changed = True

    def differing_files(self, one: str, other: str) -> list[str]:
        """Names of the files in which two models differ, given their weights' digests; empty if a model is unknown."""
        self._load()
        left, right = self._models.get(one), self._models.get(other)
        if left is None or right is None:
            return []
        return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))

    def save(self) -> None:
        """Write the file if a digest is new. Call this after the disk tier is open, since it starts empty."""
        if self.path is None or not self._changed:
            return
        for path in list(self._known)[:-_KEPT_MAX]:
            del self._known[path]
        for digest in list(self._models)[:-_MODELS_MAX]:
            del self._models[digest]
        content = {"files": self._known, "models": self._models}
        # If the directory cannot be written, the next start only takes longer.
        with contextlib.suppress(OSError):
            self._in_time(partial(_write, content))
            self._changed = False

    def _load(self) -> None:
        if self.path is None or self._known:
            return
        # If the file is missing or damaged, all digests are computed anew.
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(self._in_time(Path.read_bytes))
            self._known = {path: entry for path, entry in _object(kept, "files").items() if _is_entry(entry)}
            models = _object(kept, "models")
            self._models = {digest: files for digest, files in models.items() if isinstance(files, dict)} | self._models

    def _in_time(self, work: Callable[[Path], _Result]) -> _Result:
        """Work on the file, which is left alone from then on if its filesystem hangs. Raises OSError."""
        assert self.path is not None
        try:
            return within(LIMIT_S, self.path, partial(work, self.path))
        except TimeoutError:
            self.path = None
            raise


def _write(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as new:
            json.dump(content, new)
        Path(name).replace(path)
    finally:
        # A full disk must not get another file with each start.
        Path(name).unlink(missing_ok=True)


def _object(value: Any, name: str) -> dict[str, Any]:
    inner = value.get(name) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and isinstance(entry[-1], str)


def digests_file(disk_paths: Sequence[str]) -> Path | None:
    """The file of digests: in the first directory of the disk tier, or without disks in the user's cache directory.

    None without disks for a user without a home directory, as in containers with an arbitrary uid.
    """
    if disk_paths:
        return Path(disk_paths[0], "weights.json")
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base, "undercroft", "weights.json")


def model_place(name: str, revision: str | None, download_dir: str | None = None) -> Path | None:
    """The local file or directory of a model, perhaps one fetched from Hugging Face; None if there is none."""
    path = Path(name)
    if path.exists():
        return path
    if _from_modelscope():
        # Hugging Face may have other weights under the same name.
        return _modelscope_place(name, revision, download_dir)
    try:
        from huggingface_hub import try_to_load_from_cache

        for cache in (download_dir, None):
            found = try_to_load_from_cache(name, "config.json", cache_dir=cache, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
    except Exception:  # not a repository's name, or another hub
        return None
    return None


def _from_modelscope() -> bool:
    """Whether vLLM fetches models from ModelScope."""
    # This reads the variable without vLLM, which may not be installed here, and by vLLM's rule.
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true")


def _modelscope_place(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    try:
        # vLLM calls the same function and allows it to download.
        hub = importlib.import_module("modelscope.hub.snapshot_download")
        place = hub.snapshot_download(model_id=name, cache_dir=download_dir, local_files_only=True, revision=revision)
        return Path(place)
    except Exception:  # the package is missing, or the model is not in its cache
        return None


def weights_digest(place: Path, digests: Digests, how: str, *, code: bool = False) -> str:
    """One digest for all weights of the model at ``place``, a file or a directory; empty if a file is missing.

    All files that can hold weights count, since the load format decides which files vLLM loads. ``code``: include the
    model's own Python files.
    """
    files = _weight_files(place)
    if not _is_whole(files):
        return ""
    if code and place.is_dir():
        files |= {path.relative_to(place).as_posix(): path for path in sorted(place.rglob("*.py"))}
    found = digests.of_files(files.values(), how)
    lines = [[name, found[path]] for name, path in sorted(files.items())]
    digest = hashlib.sha256(json.dumps([how, lines]).encode()).hexdigest()
    if how == FULL:
        # The prefix marks a full digest: readers must not take it for a sampled digest.
        digest = f"{FULL}:{digest}"
    digests.note_model(digest, {name: found[path] for name, path in files.items()})
    return digest


def _is_whole(files: dict[str, Path]) -> bool:
    """Whether there are weights, and all shards that an index names. Without this check, incomplete copies of two
    fine-tunes with equal indexes could have equal digests."""
    indexes = [path for name, path in files.items() if name.endswith(".safetensors.index.json")]
    for path in indexes:
        try:
            shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            continue
        if not all((path.parent / str(shard)).is_file() for shard in shards):
            return False
    return any(not name.endswith(".index.json") for name in files)


def _weight_files(place: Path) -> dict[str, Path]:
    if place.is_file():
        # The file's own name is left out, since it says nothing about the content.
        return {place.suffix: place}
    if not place.is_dir():
        return {}
    files = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if (path.suffix in _SUFFIXES or name.endswith(".index.json")) and path.is_file():
            files[name] = path
    return files


def _key(path: Path, how: str) -> list[Any]:
    status = path.stat()
    return [how, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino]


def _full(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _SMALL:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        header = _safetensors_header(file, size) if path.suffix == ".safetensors" else b""
        digest.update(header)
        pieces = list(_tensor_pieces(header, size)) if header else []
        if not pieces:
            pieces = [(0, _EDGE), *_even_pieces(size), (size - _EDGE, _EDGE)]
        for start, length in pieces:
            digest.update(_read(file, start, length))
        return digest.hexdigest()


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    found = b""
    while len(found) < length:
        more = os.pread(file.fileno(), length - len(found), start + len(found))
        if not more:
            break
        found += more
    return found


def _safetensors_header(file: BinaryIO, size: int) -> bytes:
    """The length and the JSON text at the start of a safetensors file; empty for any other file."""
    length = int.from_bytes(_read(file, 0, 8), "little")
    if length > min(_HEADER_MAX, size - 8):
        return b""
    return _read(file, 0, 8 + length)


def _tensor_pieces(header: bytes, size: int) -> Iterator[tuple[int, int]]:
    """A piece in the middle of each tensor (of every n-th if there are many), and pieces all over the file."""
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header[8:]).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    tensors.sort()
    half = _PIECES // 2
    step = -(-len(tensors) // half) if tensors else 1
    for begin, end in tensors[::step]:
        length = min(_PIECE, end - begin)
        yield len(header) + begin + (end - begin - length) // 2, length
    yield from _even_pieces(size, half)


def _even_pieces(size: int, count: int = _PIECES) -> Iterator[tuple[int, int]]:
    """``count`` pieces from the file's start to its end, at equal distances."""
    for index in range(count):
        yield (size - _PIECE) * index // (count - 1), _PIECE
