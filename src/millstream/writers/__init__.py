"""Who writes a home's streams: the owner, an application that appends, or one writer among several."""
