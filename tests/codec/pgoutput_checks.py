"""Helper of the decoders' tests: decode with both decoders, and check that they agree to the bit."""

from collections.abc import Sequence

from tests.codec.pgoutput_messages import TablesByOid
from tests.codec.reference_decoder import decode_plain

from millstream.codec.pgoutput import MessageRun, RelationCache, decode_transactions
from millstream.model.operations import OPERATION_SCHEMA, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import append_row_schema


def check_equal(one: WriteOps, other: WriteOps) -> None:
    assert one.reached == other.reached
    assert one.operations.schema == OPERATION_SCHEMA
    assert one.operations.equals(other.operations)
    assert [t.schema for t in one.tables] == [t.schema for t in other.tables]
    for left, right in zip(one.tables, other.tables, strict=True):
        assert left.rows.schema.equals(append_row_schema(left.schema), check_metadata=True)
        assert right.rows.schema.equals(append_row_schema(left.schema), check_metadata=True)
        left.rows.validate(full=True)
        right.rows.validate(full=True)
        assert repr(left.rows.to_pydict()) == repr(right.rows.to_pydict())  # repr: NaN equals itself


def decode(messages: Sequence[bytes], directory: TablesByOid | None = None, *, after: int = 0) -> WriteOps:
    """Decode with both, each into its own cache, and check that they agree."""
    directory = directory or TablesByOid()
    plain_cache, cache = RelationCache(), RelationCache()
    plain = decode_plain(messages, directory, plain_cache, after=Lsn(after))
    vectorised = decode_transactions(MessageRun.of(messages), directory, cache, after=Lsn(after))
    check_equal(plain, vectorised)
    assert plain_cache.all() == cache.all()
    return vectorised
