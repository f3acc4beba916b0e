"""The log's records as messages of a consumer: which ones it receives, their groups, and their JSON."""
