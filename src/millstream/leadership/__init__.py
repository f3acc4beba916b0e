"""Leadership of a stream: which node leads, as this node knows it, and calls to other nodes.

Start at `node_roles`: the role of this node in a stream, which all processes of the home obey. `known_leaders`
says where a stream is written, `node_calls` asks other nodes for their state and promise, and `promotion_check`
finds that another node was promoted.
"""
