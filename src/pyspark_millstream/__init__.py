"""Register `format("millstream")` with Spark, which imports every package whose name begins with `pyspark_`."""

from millstream.spark.log_source import MillstreamSource as DefaultSource

__all__ = ["DefaultSource"]
