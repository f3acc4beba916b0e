"""The inside of `wal.reader`: frames of one segment decoded together, shards merged, records as readers get them."""
