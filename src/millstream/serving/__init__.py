"""What a home serves over the network: its status, and what applications send it."""
