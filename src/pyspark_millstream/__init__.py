"""Lets Spark find `format("millstream")` by itself: it imports every package whose name begins with `pyspark_`."""
