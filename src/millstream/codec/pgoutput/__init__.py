"""pgoutput, PostgreSQL's logical replication messages (protocol 2, text values), to operations.

Text mode only: PostgreSQL's own text of every value is then always available, and is kept if a
typed column can't hold the value exactly. The texts rely on a pinned session (DateStyle ISO,
TimeZone UTC, IntervalStyle postgres, bytea_output hex, extra_float_digits 3), which capture sets.

How capture uses it
-------------------
- `relations = RelationCache()` for each replication connection; a `TableDirectory` over the
  catalog.
- A *run* is whole transactions (Begin … Commit), messages outside transactions (`M`), and Relation,
  Type and Origin messages between them; no streamed blocks. Gather raw XLogData payloads and decode
  them:

      ops = decode_transactions(MessageRun.of(payloads, header_bytes=25), directory, relations, after=reached)

  `after`: transactions that end at or below it are dropped whole (their Relation messages still
  count). A message outside a transaction has the LSN at which its record ends, as `commit_lsn` and as
  `commit_end_lsn`: above the end of any earlier transaction, below the end of any later one. It must
  not be a byte more: the next record may be a commit, and a server that is asked to continue behind
  the commit's beginning leaves that transaction out. `ops.reached` is the last end in the run,
  dropped or not (empty if the run holds no end); `ops.tables` may be empty.
- `TableUndecodable` (details: `relation_oid`, `table`, `reason`) names one table. Quarantine
  the table, so that the directory answers with a RAW schema, and decode the same run again: `relations`
  is still as it was before the run. `ProtocolViolation` is about the stream itself.
- Streamed blocks: spill the messages between StreamStart and StreamStop by top xid. Parse
  (`parse_message(…, streamed=True)`) only those of type `R` and `Y`, and pass them to
  `relations.note_streamed(top_xid, …)` as they arrive. Call `relations.abort_streamed(top_xid)` on
  any StreamAbort of it. On StreamCommit:

      op = decode_spilled(read, directory, relations, commit, aborted=aborted_subxids)
      relations.commit_streamed(commit.xid)

  `read()` yields `MessageRun`s of any bounded size, from the start at every call. The result is a
  `SpilledOp` (None if it has no captured records). Everything was decoded once, so its `chunks()`
  don't fail. A huge ordinary transaction can be spilled as well: pass the messages between Begin and
  Commit with `streamed=False`.
- `warm()` compiles (or loads) the machine code; otherwise the first run does, which takes seconds.
"""

from __future__ import annotations

from millstream.codec.pgoutput.rare_messages import (
    LogicalMessage,
    Relation,
    RelationColumn,
    StreamCommit,
    Type,
    parse_message,
)
from millstream.codec.pgoutput.relations import (
    HEARTBEAT_PREFIX,
    MESSAGES_COLUMNS,
    RAW_COLUMNS,
    RelationCache,
    TableDirectory,
    encode_raw,
    raw_schema,
    relation_columns,
    table_schema,
)
from millstream.codec.pgoutput.runs import MessageRun
from millstream.codec.pgoutput.spilled import decode_spilled
from millstream.codec.pgoutput.transaction_decoder import decode_transactions, warm

__all__ = [
    "HEARTBEAT_PREFIX",
    "MESSAGES_COLUMNS",
    "RAW_COLUMNS",
    "LogicalMessage",
    "MessageRun",
    "Relation",
    "RelationCache",
    "RelationColumn",
    "StreamCommit",
    "TableDirectory",
    "Type",
    "decode_spilled",
    "decode_transactions",
    "encode_raw",
    "parse_message",
    "raw_schema",
    "relation_columns",
    "table_schema",
    "warm",
]
