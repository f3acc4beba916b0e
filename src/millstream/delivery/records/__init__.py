"""The log's records as messages of a consumer: which ones it receives, their groups, and their JSON.

Start at `record_reader`. `where_filter` chooses the records, `groups` finds their groups, and `latest` makes the
messages of consumers of kind `latest`.
"""
