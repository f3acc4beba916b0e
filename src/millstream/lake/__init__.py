"""Lake tables without Spark: layout, history, folds into current, commit cuts, query.

Modules that write (`layout`, `history`, `fold`, `current`, `commits`) need only the core package and deltalake,
because they run in Spark's executors; `query` also needs duckdb and imports it when first used.
"""
