"""A home: its folder, its configuration put to use, its catalog."""
