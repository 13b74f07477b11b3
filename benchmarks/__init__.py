"""Measurements that a person starts; nothing in the product imports them."""
