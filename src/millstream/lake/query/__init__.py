"""SQL over the lake at one position, by DuckDB, without Spark."""
