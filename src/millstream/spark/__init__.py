"""Spark: the only room that imports pyspark. The data source, the pipelines, the lake sinks, and Spark's Java."""
