"""Lake tables without Spark: layout, history, folds into current, commit cuts, query.

Everything that writes (`layout`, `history`, `fold`, `current`, `commits`) needs the core package and deltalake only, for it
runs in Spark's executors; `query` needs duckdb too and imports it when first used.
"""
