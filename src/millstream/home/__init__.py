"""A home: the folder with its configuration, its data and its catalog.

Start at `home`, which finds and opens one. `paths` names its folders, `config_mapping` turns the configuration
into the parameters of the other rooms, and `retention` tells the log what its holders still need.
"""
