"""Spark: the data source and sink `millstream`, the pipelines, and Spark's Java. Only this room imports pyspark.

Start at `driver`, a pipeline's loop. `batch_landing` lands the log's next stretches as history, one job a batch, and `fold_thread`
makes `current` and `scd2` of it. `log_source` and `log_sink` are `format("millstream")` for other Spark programs.
"""
