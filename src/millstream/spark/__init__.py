"""Spark: the data source and sink `millstream`, the pipelines, and Spark's Java. Only this room imports pyspark.

Start at `driver`, a pipeline's streaming query. `batches` lands micro-batches as history, `folding` makes
`current` and `scd2` of it. `source` and `sink` are `format("millstream")` for other Spark programs.
"""
