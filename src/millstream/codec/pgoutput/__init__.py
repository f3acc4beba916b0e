"""pgoutput, PostgreSQL's logical replication messages (protocol 2, text values), to operations.

Text mode only: PostgreSQL's own text of every value is then always at hand, and what a typed column can't hold exactly
keeps it. The texts rely on a pinned session (DateStyle ISO, TimeZone UTC, IntervalStyle postgres, bytea_output hex,
extra_float_digits 3), which capture sets.

How capture uses it
-------------------
- `relations = RelationCache()` for each replication connection; a `TableDirectory` over the catalog.
- A *run* is whole transactions (Begin … Commit), messages outside transactions (`M`), and Relation, Type and Origin
  messages wherever they came; no streamed blocks. Gather raw XLogData payloads and hand them over:

      ops = decode_transactions(MessageRun.of(payloads, header_bytes=25), directory, relations, after=reached)

  `after`: transactions that end at or below it are dropped whole (their Relation messages still count). A message
  outside a transaction has its LSN, which is where its record ends, as `commit_lsn` and as `commit_end_lsn`: above the end of any
  transaction before it, below that of any behind it. Not a byte more: the next record may be a commit, and a server that is asked
  to go on behind its beginning leaves that transaction out. `ops.reached` is the last end in the run, dropped or not
  (empty where the run holds no end); `ops.tables` may be empty.
- `TableUndecodable` (details: `relation_oid`, `table`, `reason`) names one table. Set it aside, so that the directory
  answers with a RAW schema, and decode the same run again: `relations` still is as it was before the run.
  `ProtocolViolation` is about the stream itself.
- Streamed blocks: spill the messages between StreamStart and StreamStop by top xid. Parse (`parse_message(…,
  streamed=True)`) only those of type `R` and `Y`, and tell `relations.note_streamed(top_xid, …)` as they arrive;
  `relations.abort_streamed(top_xid)` on any StreamAbort of it. On StreamCommit:

      op = decode_spilled(read, directory, relations, TransactionFacts.of_streamed(commit), aborted=aborted_subxids)
      relations.commit_streamed(commit.xid)

  `read()` yields `MessageRun`s of any bounded size, from the start at every call. The result is a `SpilledOp` (None
  where nothing captured is in it): everything was decoded once, so its `chunks()` don't fail. A huge ordinary
  transaction can be spilled as well: hand over what stood between Begin and Commit with `streamed=False`.
- `warm()` compiles (or loads) the machine code; else the first run does, which takes seconds.

`decode_plain` gives the same result as `decode_transactions`, message by message in plain Python: the oracle in tests
and the fallback where numba isn't there.
"""

from __future__ import annotations

from millstream.codec.pgoutput.messages import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    RelationColumn,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
    parse_message,
)
from millstream.codec.pgoutput.plain import decode_plain
from millstream.codec.pgoutput.relations import (
    HEARTBEAT_PREFIX,
    MESSAGES_COLUMNS,
    RAW_COLUMNS,
    RelationCache,
    TableDirectory,
    TransactionFacts,
    decode_raw,
    encode_raw,
    raw_schema,
    relation_columns,
    table_schema,
)
from millstream.codec.pgoutput.runs import MessageRun
from millstream.codec.pgoutput.spilled import decode_spilled
from millstream.codec.pgoutput.vectorised import decode_transactions, warm

__all__ = [
    "HEARTBEAT_PREFIX",
    "MESSAGES_COLUMNS",
    "RAW_COLUMNS",
    "UNCHANGED",
    "Begin",
    "Commit",
    "Delete",
    "Insert",
    "LogicalMessage",
    "Message",
    "MessageRun",
    "Origin",
    "Relation",
    "RelationCache",
    "RelationColumn",
    "StreamAbort",
    "StreamCommit",
    "StreamStart",
    "StreamStop",
    "TableDirectory",
    "TransactionFacts",
    "Truncate",
    "Type",
    "Update",
    "decode_plain",
    "decode_raw",
    "decode_spilled",
    "decode_transactions",
    "encode_raw",
    "parse_message",
    "raw_schema",
    "relation_columns",
    "table_schema",
    "warm",
]
