"""Claims of epochs in an object store: which node may write there.

Each leader writes under its own epoch, and each name once. If several nodes claim an epoch, one
wins. The node that has claimed an epoch *ends* every lower one, by writing an end at the name of
that epoch's next shipment. So an older leader's next write meets an object that isn't its own: it
is fenced without any notice, and stores nothing more.
"""

from __future__ import annotations

import contextlib
import json

from millstream.codec.replication_messages import decode_message, encode_message
from millstream.errors import Fenced, ShipmentUnreadable
from millstream.model.ids import Epoch
from millstream.replication.object_store.object_names import Layout, group_of, listed_in
from millstream.replication.object_store.store_client import Objects


def claim(objects: Objects, layout: Layout, epoch: Epoch, holder: str, claimant: str = "") -> bool:
    """Claim an epoch; return whether the holder has it now.

    Lower epochs are then ended: their leaders store nothing more.

    The same holder may claim it again, unless a higher epoch was claimed since. If two homes have
    one node name, the epoch is the claimant's, or belongs to a home without a claimant: one that
    was restored from the store. Raises `StoreUnavailable`: then it may be claimed.
    """
    said = json.dumps({"holder": holder, "claimant": claimant}).encode()
    if not objects.put_new(layout.leader(epoch), [said]):
        found = _claimed(objects, layout, epoch)
        if found.get("holder") != holder or (claimant and found.get("claimant", "") != claimant):
            return False
    claims = _claims_of(objects, layout)
    if claims[-1] > epoch:
        return False
    if objects.get(layout.lower_ended(epoch)) is None:
        for lower in reversed(claims[:-1]):
            _end(objects, layout, lower, epoch, holder)
            if objects.get(layout.lower_ended(lower)) is not None:
                break
        objects.put_new(layout.lower_ended(epoch), [said])
    return True


def greatest_claim(objects: Objects, layout: Layout) -> Epoch:
    """Return the highest claimed epoch; 0 if there is none."""
    return (_claims_of(objects, layout) or [Epoch(0)])[-1]


def _claims_of(objects: Objects, layout: Layout) -> list[Epoch]:
    """Return the claimed epochs, in ascending order."""
    names = (listed.name.rpartition("/")[2] for listed in listed_in(objects, layout.leaders))
    return [Epoch(int(name)) for name in names if name.isdigit()]


def holder_of(objects: Objects, layout: Layout, epoch: Epoch) -> str:
    """Return the node that has claimed an epoch; empty if none has."""
    return str(_claimed(objects, layout, epoch).get("holder", ""))


def _claimed(objects: Objects, layout: Layout, epoch: Epoch) -> dict[str, object]:
    data = objects.get(layout.leader(epoch))
    return {} if data is None else dict(json.loads(bytes(data)))


def end_of(data: memoryview) -> Fenced | None:
    """Return an epoch's end, if an object is one; raise `ShipmentUnreadable` if it can't be read."""
    message = decode_message(data)
    return message if isinstance(message, Fenced) else None


def _end(objects: Objects, layout: Layout, lower: Epoch, epoch: Epoch, holder: str) -> None:
    """Write an epoch's end after its last shipment; its leader may keep writing until it meets the end."""
    said = encode_message(Fenced(f"{holder} leads under epoch {epoch}", epoch=int(epoch), holder=holder))
    folder = f"{layout.groups}/{lower:020}"
    last = ""
    while True:
        for listed in listed_in(objects, folder, last):
            last = listed.name
        data = None if not last else objects.get(last)
        with contextlib.suppress(ShipmentUnreadable):
            if data is not None and end_of(data) is not None:
                return
        if objects.put_new(layout.group(lower, group_of(last)[1] + 1 if last else 0), said):
            return
