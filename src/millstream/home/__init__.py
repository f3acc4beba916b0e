"""A home: its folder, its configuration's use, its catalog."""
