"""Names in an object store, what objects have them, and a probe. docs/internals/FORMAT.md has the layout."""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from millstream.codec.replication_messages import Message, decode_message
from millstream.errors import ShipmentUnreadable, StoreUnavailable
from millstream.model.ids import Epoch, RegionId, ShardId
from millstream.model.positions import Offset
from millstream.model.replication import ByteEnd, SegmentPart
from millstream.replication.object_store.store_client import Listed, Objects

TRAILER_BYTES: Final = 64
"""Size in bytes of a segment's trailer."""
SEGMENT_END_MAGIC: Final = b"MILLEND\n"
_TRAILER: Final = struct.Struct("<8xq40x8s")
"""A segment's trailer: the end offset, and the magic. See docs/internals/FORMAT.md."""
_SHARD_DIGITS: Final = 10
_OWN_NAME: Final = re.compile(r"(?:[^/]+/)?(?:\d{20}/)?\d{20}(?:\.ended|\.whole)?")
"""Pattern for the part of every listed name after the folder."""
_DAMAGED_HINT: Final = (
    "Put the object back, from an older version or a copy of the store. If there is none, move it and all later ones "
    "out of its folder: a leader that still has their bytes stores them again; otherwise a restore ends before them."
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of one stream's log of one region."""

    stream: str
    region: RegionId

    @property
    def root(self) -> str:
        """Folder of the whole log."""
        return f"{self.stream}/{self.region:010}"

    @property
    def leaders(self) -> str:
        """Folder of claims."""
        return f"{self.root}/leaders"

    @property
    def groups(self) -> str:
        """Folder of shipments."""
        return f"{self.root}/groups"

    @property
    def documents(self) -> str:
        """Folder of documents."""
        return f"{self.root}/documents"

    @property
    def branches(self) -> str:
        """Folder of branches."""
        return f"{self.root}/branches"

    @property
    def begins(self) -> str:
        """Object that records what was dropped before the first shipment."""
        return f"{self.root}/begins"

    def leader(self, epoch: Epoch) -> str:
        """Return the name of a claim."""
        return f"{self.leaders}/{epoch:020}"

    def lower_ended(self, epoch: Epoch) -> str:
        """Return the name of the object that shows that all epochs below this one have their ends."""
        return f"{self.leader(epoch)}.ended"

    def group(self, epoch: Epoch, number: int) -> str:
        """Return the name of a shipment, or of an epoch's end."""
        return f"{self.groups}/{epoch:020}/{number:020}"

    def shard(self, shard: ShardId) -> str:
        """Return the folder of a shard's sealed segments."""
        return f"{self.root}/{shard:010}"

    def segment(self, shard: ShardId, epoch: Epoch, base: Offset) -> str:
        """Return the name of a sealed segment."""
        return f"{self.shard(shard)}/{epoch:020}/{base:020}"

    def branch(self, epoch: Epoch) -> str:
        """Return the name of the branch where a leader's log diverges from what was stored before it."""
        return f"{self.branches}/{epoch:020}"

    def branch_whole(self, epoch: Epoch) -> str:
        """Return the name of the object that shows that a leader's branch is stored whole."""
        return f"{self.branch(epoch)}.whole"

    def document(self, name: str, epoch: Epoch, version: int) -> str:
        """Return the name of a document, in the version of an epoch's leader."""
        return f"{self.documents}/{name}/{epoch:020}/{version:020}"


def listed_in(objects: Objects, folder: str, behind: str = "") -> Iterator[Listed]:
    """List as `Objects.listed`, in a folder of this layout.

    Names that people and their tools have added are ignored.
    """
    own = len(folder) + 1
    return (found for found in objects.listed(folder, behind) if _OWN_NAME.fullmatch(found.name, own))


def message_in(name: str, data: memoryview) -> Message:
    """Decode an object. Raises `ShipmentUnreadable`, with its name, if it can't be read."""
    try:
        return decode_message(data)
    except ShipmentUnreadable as error:
        raise ShipmentUnreadable(
            f"object {name} is damaged: {error.message}", hint=_DAMAGED_HINT, object=name
        ) from error


def group_of(name: str) -> tuple[Epoch, int]:
    """Return the epoch and number in a shipment's name."""
    _, epoch, number = name.rsplit("/", 2)
    return Epoch(int(epoch)), int(number)


def document_of(name: str) -> tuple[str, Epoch, int]:
    """Return the document's name, its epoch and its version in an object's name."""
    _, document, epoch, version = name.rsplit("/", 3)
    return document, Epoch(int(epoch)), int(version)


def segment_of(name: str) -> tuple[Epoch, Offset]:
    """Return the epoch and the base offset in a segment's name."""
    _, epoch, base = name.rsplit("/", 2)
    return Epoch(int(epoch)), Offset(int(base))


def behind(part: SegmentPart) -> ByteEnd:
    """Return the position of a shard after these bytes; after a whole footer, the next segment's beginning."""
    if part.is_end and len(part.data) >= TRAILER_BYTES:
        end, magic = _TRAILER.unpack(part.data[-TRAILER_BYTES:])
        if magic == SEGMENT_END_MAGIC:
            return ByteEnd(Offset(end), 0)
    return part.end


def shards_of(objects: Objects, layout: Layout) -> list[ShardId]:
    """Return the shards with sealed segments."""
    return [
        ShardId(int(name)) for name in objects.folders(layout.root) if name.isdigit() and len(name) == _SHARD_DIGITS
    ]


def probe(objects: Objects, layout: Layout) -> None:
    """Test conditional writes: write an object twice. Raises `StoreUnavailable` (`store_unusable`) if the second write succeeds, too."""
    name = f"{layout.root}/probes/{secrets.token_hex(8)}"
    try:
        if not objects.put_new(name, [b"first"]):
            raise StoreUnavailable("the object store reports that a new name already exists", code="store_unusable")
        if objects.put_new(name, [b"second"]) or bytes(objects.get(name) or b"") != b"first":
            raise StoreUnavailable("the object store overwrote an object despite If-None-Match", code="store_unusable")
    finally:
        objects.delete([name])
