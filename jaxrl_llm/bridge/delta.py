"""Updates of weights as the bits that have changed, and the receiver's copy of the tensors that they change.

An update consists of pieces. A piece is the length of its header (8 bytes), the header (JSON) and, in the
header's order, the content of each tensor: all bits ("whole"), nothing (the tensor is the same), or changes
(`encode`). Equal bits are not sent, however far a weight moved before it was rounded; an XOR of bits
restores every value exactly, NaN and -0.0 too, where a sum of differences would round.

Servers get this file (`rollout/servers/commands.py`): it imports numpy alone, and nothing of this project.
"""

import hashlib
import json
import struct
import zlib
from dataclasses import asdict, dataclass, field

import numpy as np

LENGTH = struct.Struct("<Q")
LONG_GAP = 255  # a byte of this value: so many unchanged entries, and the gap goes on


@dataclass(frozen=True)
class Piece:
    """The place of a piece in its update.

    Attributes:
        base: label of the weights that the update changes; "" = it has all weights.
        label: of the updated weights. index: of the piece, from 0. last: the update is complete.
    """

    base: str
    label: str
    index: int
    last: bool


@dataclass(frozen=True)
class Entry:
    """One tensor of a piece.

    Attributes:
        dtype: name of safetensors, such as "BF16". is_whole: `size` bytes are all of its bits.
        sha256: of its bits after the update.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_whole: bool
    size: int
    sha256: str


def as_bits(array: np.ndarray) -> np.ndarray:
    """Return an array's memory as unsigned integers of its item size, of the same shape."""
    return array.view(f"u{array.itemsize}")


def sha256_of(array: np.ndarray) -> str:
    """Return the SHA-256 of a contiguous array's memory."""
    return hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()


def encode(old: np.ndarray, new: np.ndarray) -> bytes:
    """Return the changes from `old` to `new`, equal shapes of unsigned integers; b"" = there are none.

    Deflated: the gaps between changed entries, a byte each (`LONG_GAP`), then old XOR new by planes of bytes,
    which compress well since most weights move by one unit in the last place. Before that: how many changed.
    """
    old, new = old.reshape(-1), new.reshape(-1)
    places = np.flatnonzero(old != new)
    if not len(places):
        return b""
    long, rest = np.divmod(np.diff(places, prepend=-1) - 1, LONG_GAP)
    ends = np.cumsum(long + 1)
    gaps = np.full(ends[-1], LONG_GAP, np.uint8)
    gaps[ends - 1] = rest
    planes = (old[places] ^ new[places]).view(np.uint8).reshape(len(places), -1).T
    deflate = zlib.compressobj(1, strategy=zlib.Z_RLE)
    parts = deflate.compress(gaps), deflate.compress(np.ascontiguousarray(planes)), deflate.flush()
    return LENGTH.pack(len(places)) + b"".join(parts)


def apply_changes(bits: np.ndarray, changes: bytes) -> None:
    """Change an array of unsigned integers in place by the changes that `encode` returned for it.

    Raises:
        ValueError: they are not changes of such an array.
    """
    (count,) = LENGTH.unpack_from(changes)
    try:
        data = np.frombuffer(zlib.decompress(changes[LENGTH.size :]), np.uint8)
    except zlib.error as error:
        raise ValueError(f"changes that cannot be read: {error}") from None
    gaps, planes = np.split(data, [len(data) - count * bits.itemsize])
    is_end = gaps != LONG_GAP
    places = (np.cumsum(gaps + is_end.astype(np.int64)) - 1)[is_end]
    if len(places) != count or places[-1] >= bits.size:
        raise ValueError(f"changes of another tensor than one of {bits.size} entries")
    values = np.ascontiguousarray(planes.reshape(bits.itemsize, count).T).view(bits.dtype)
    bits.reshape(-1)[places] ^= values.reshape(-1)


def write_piece(piece: Piece, entries: list[Entry], contents: list) -> bytes:
    """Return a piece; `contents` are bytes, or arrays whose memory is meant, one for each entry."""
    header = json.dumps({**asdict(piece), "tensors": [asdict(entry) for entry in entries]}).encode()
    return b"".join([LENGTH.pack(len(header)), header, *contents])


@dataclass
class Shadow:
    """A receiver's copy of the checkpoint's tensors, for one update after the other.

    Attributes:
        label: of the weights; "" = they are incomplete, and the next update must have all of them.
        tensors: name -> unsigned integers, in the tensor's shape. dtypes: name -> name of safetensors.
    """

    label: str = ""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _next: int = 0

    def receive(self, data: bytes) -> bool:
        """Take a piece. Returns True if `tensors` are complete: then, and only then, they may be loaded.

        Raises:
            ValueError: a piece of another update, or bits that are not the sender's after it.
        """
        (length,) = LENGTH.unpack_from(data)
        start = LENGTH.size + length
        header = json.loads(data[LENGTH.size : start])
        entries = [Entry(**entry) for entry in header.pop("tensors")]
        self._check_place(piece := Piece(**header))
        for entry in entries:
            self._take(entry, data[start : start + entry.size])
            start += entry.size
        self._next += 1
        if not piece.last:
            return False
        self._next = 0
        if missing := sorted(self.tensors.keys() - self._seen):
            raise ValueError(f"an update without {missing[:5]}")
        self.label = piece.label
        return True

    def _check_place(self, piece: Piece) -> None:
        if piece.index == 0:
            if piece.base and piece.base != self.label:
                raise ValueError(f"an update of weights {piece.base!r}, and here are {self.label!r}")
            self.label, self._seen, self._next = "", set(), 0
            if not piece.base:
                self.tensors, self.dtypes = {}, {}
        elif piece.index != self._next:
            raise ValueError(f"piece {piece.index} of an update after {self._next} pieces")

    def _take(self, entry: Entry, content: bytes) -> None:
        name = entry.name
        if name in self._seen:
            raise ValueError(f"{name} for the second time in an update")
        self._seen.add(name)
        if entry.is_whole:
            kind = f"u{entry.size // max(int(np.prod(entry.shape)), 1)}"
            self.tensors[name] = np.frombuffer(bytearray(content), kind).reshape(entry.shape)
            self.dtypes[name] = entry.dtype
        elif name not in self.tensors:
            raise ValueError(f"changes of {name}, which is not here")
        elif content:
            apply_changes(self.tensors[name], content)
        if sha256_of(self.tensors[name]) != entry.sha256:
            raise ValueError(f"{name} has other bits than the trainer's")
