"""One tree of errors: each has a code, a remedy and the role that can apply it, and whether to retry.

Every error that Millstream raises on purpose derives from `MillstreamError`. Errors are picklable
(they cross process borders in Spark) and carry their facts in `details`, so that programs need not
parse messages. A broken invariant is not in this tree: it is a bug in Millstream, and it crashes
with an `AssertionError`.
"""

from __future__ import annotations

from millstream.errors._access import AccessError as AccessError
from millstream.errors._access import Unauthenticated as Unauthenticated
from millstream.errors._buffers import BufferedOpUndecodable as BufferedOpUndecodable
from millstream.errors._buffers import BufferMissing as BufferMissing
from millstream.errors._buffers import BufferOffsetGone as BufferOffsetGone
from millstream.errors._buffers import BufferOutcomeUnknown as BufferOutcomeUnknown
from millstream.errors._buffers import BufferRefused as BufferRefused
from millstream.errors._buffers import BufferUnavailable as BufferUnavailable
from millstream.errors._buffers import WriteBufferError as WriteBufferError
from millstream.errors._catalog import CatalogError as CatalogError
from millstream.errors._codec import CodecError as CodecError
from millstream.errors._codec import CorruptFrame as CorruptFrame
from millstream.errors._codec import InvalidValue as InvalidValue
from millstream.errors._codec import ProtocolViolation as ProtocolViolation
from millstream.errors._codec import TableUndecodable as TableUndecodable
from millstream.errors._codec import UnreadableBytes as UnreadableBytes
from millstream.errors._delivery import DeliveryError as DeliveryError
from millstream.errors._engine import EngineError as EngineError
from millstream.errors._http import HttpError as HttpError
from millstream.errors._ingest import DedupWindowExpired as DedupWindowExpired
from millstream.errors._ingest import IdempotencyKeyReused as IdempotencyKeyReused
from millstream.errors._ingest import IngestError as IngestError
from millstream.errors._ingest import SessionExpired as SessionExpired
from millstream.errors._ingest import SessionGap as SessionGap
from millstream.errors._ingest import SessionsNeedOneWriter as SessionsNeedOneWriter
from millstream.errors._lake import LakeBehind as LakeBehind
from millstream.errors._lake import LakeConflict as LakeConflict
from millstream.errors._lake import LakeError as LakeError
from millstream.errors._lake import LakeFilesGone as LakeFilesGone
from millstream.errors._lake import LakeTableForeign as LakeTableForeign
from millstream.errors._lake import LakeUnavailable as LakeUnavailable
from millstream.errors._log import AppendOutcomeUnknown as AppendOutcomeUnknown
from millstream.errors._log import CorruptWal as CorruptWal
from millstream.errors._log import DiskFull as DiskFull
from millstream.errors._log import HomeClosed as HomeClosed
from millstream.errors._log import LogError as LogError
from millstream.errors._log import Overloaded as Overloaded
from millstream.errors._log import ShardLocked as ShardLocked
from millstream.errors._log import StaleEpoch as StaleEpoch
from millstream.errors._log import UnsupportedFormat as UnsupportedFormat
from millstream.errors._log import WriterClosed as WriterClosed
from millstream.errors._positions import CursorExpired as CursorExpired
from millstream.errors._positions import FollowerBehindRetention as FollowerBehindRetention
from millstream.errors._positions import LogTruncated as LogTruncated
from millstream.errors._positions import OffsetBeyondEnd as OffsetBeyondEnd
from millstream.errors._positions import OffsetExpired as OffsetExpired
from millstream.errors._positions import PositionError as PositionError
from millstream.errors._positions import TokenFromFuture as TokenFromFuture
from millstream.errors._remote import RemoteError as RemoteError
from millstream.errors._replication import Diverged as Diverged
from millstream.errors._replication import Fenced as Fenced
from millstream.errors._replication import LinkLost as LinkLost
from millstream.errors._replication import MergeStateUnreadable as MergeStateUnreadable
from millstream.errors._replication import NodeNameTaken as NodeNameTaken
from millstream.errors._replication import NotEnoughReplicas as NotEnoughReplicas
from millstream.errors._replication import ReadOnly as ReadOnly
from millstream.errors._replication import ReplicaGap as ReplicaGap
from millstream.errors._replication import ReplicationError as ReplicationError
from millstream.errors._replication import RoleUnreadable as RoleUnreadable
from millstream.errors._replication import ShipmentUnreadable as ShipmentUnreadable
from millstream.errors._replication import StoreUnavailable as StoreUnavailable
from millstream.errors._root import Code as Code
from millstream.errors._root import MillstreamError as MillstreamError
from millstream.errors._root import Retry as Retry
from millstream.errors._root import codes_of as codes_of
from millstream.errors._root import error_of as error_of
from millstream.errors._root import may_pass as may_pass
from millstream.errors._routing import PartialWrite as PartialWrite
from millstream.errors._routing import RoutingError as RoutingError
from millstream.errors._sequencing import SequencingError as SequencingError
from millstream.errors._source import SourceError as SourceError
from millstream.errors._usage import ConfigError as ConfigError
from millstream.errors._usage import HomeBusy as HomeBusy
from millstream.errors._usage import InvalidQuery as InvalidQuery
from millstream.errors._usage import UnknownStream as UnknownStream
from millstream.errors._usage import UnknownTable as UnknownTable
from millstream.errors._usage import UsageError as UsageError

for _class in tuple(globals().values()):
    if isinstance(_class, type):
        _class.__module__ = __name__  # a traceback names the module from which callers import it
