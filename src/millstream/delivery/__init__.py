"""Delivery to consumers: named readers whose positions the home stores."""
