"""Lake tables without Spark: where they lie, how they are written, folded, kept small, and queried.

Start at `layout` (folders and names) and `history` (records are appended once). `folded` makes `current` and `scd2`
of it, `commit_cuts` names the versions that belong together, `maintenance` deletes what no reader needs, and `query`
answers SQL. Modules that write need only the packages of the extra `executor`, because they run in Spark's executors; `query`
also needs duckdb and imports it when first used. `postgres` is the lake in a database.
"""
