"""`python -m bench [--only PREFIX] [--list]`: each figure as one JSON line on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import signal
import sys

from bench import (  # noqa: F401 - they register their figures
    aged,
    buffers,
    callers,
    capture,
    cluster,
    commands,
    console,
    consumers,
    first_load,
    flight,
    fold_and_query,
    forage,
    freshness,
    home_appends,
    http,
    kafka_topics,
    landing,
    latency,
    line_protocol,
    log_costs,
    log_open,
    merged_reads,
    nodes,
    regions,
    replication,
    routing,
    sequencer,
    sessions,
    signals,
    small_tables,
    spark_source,
    store_requests,
    wal,
)
from bench.figures import asked, keep, names, say, selected, table


def main() -> int:
    """Measure the chosen figures; exit 2 if no figure has that name."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--only", default="", metavar="PREFIX", help="figures whose name starts with it")
    parser.add_argument("--list", action="store_true", help="name the figures and end")
    parser.add_argument("--table", action="store_true", help="print the last results as Markdown and end")
    parser.add_argument(
        "--rows", type=int, metavar="N", help="rows of the table, where a figure has one of its own size"
    )
    parser.add_argument("--seconds", type=int, metavar="N", help="how long, where a figure runs for a time")
    parser.add_argument("--runs", type=int, metavar="N", help="counted runs, where a figure is measured more than once")
    options = parser.parse_args()
    # A SIGTERM, too, must end the started processes and remove the filled folders, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    asked.rows, asked.seconds, asked.runs = options.rows, options.seconds, options.runs
    if options.list:
        print("\n".join(names()))
        return 0
    if options.table:
        print(table())
        return 0
    chosen = selected(options.only)
    if not chosen:
        say(f"no figure starts with {options.only!r}; there are: {', '.join(names())}")
        return 2
    for measure in chosen:
        for figure in measure():
            print(figure.line(), flush=True)
            if not asked.is_a_try:
                keep([figure])
    return 0


if __name__ == "__main__":
    sys.exit(main())
