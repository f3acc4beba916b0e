"""The processes that write a home's streams: the owner, an application that appends, or one writer among several."""
