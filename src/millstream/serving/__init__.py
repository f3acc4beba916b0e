"""The network services of a home: its status, and the endpoints that applications write to."""
